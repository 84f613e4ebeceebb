"""What is measured and counted of a model for the report of its plan (`planner.outlook`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.comm.fusion import nbytes
from tfdist.planner.amounts import told_bytes
from tfdist.planner.outlook import Held, Measured, Report, Setting
from tfdist.planner.plan import Plan
from tfdist.planner.predict import predict
from tfdist.split import profile
from tfdist.split.network import Network
from tfdist.split.planning import Wishes

SLOTS = 2  # of a trained weight, where the optimizer is not built: as Adam has


def report(
    network: Network,
    plan: Plan,
    asked: Wishes,
    batch: int,
    slots: Mapping[int, int] | None = None,
    measured: Measured | None = None,
    placed: bool = False,
) -> Report:
    """Times what has not been timed yet, and predicts what a plan brings.

    Args:
      network: the model.
      plan: for it.
      asked: how it is carried out.
      batch: samples of a batch.
      slots: bytes of the optimizer's slots by id of their variable; None where they do not exist yet.
      measured: steps that have happened.
      placed: whether the model's variables are where the plan wants them, so that each operation is timed there.

    Raises:
      ValueError: an operation does not work on made-up input.
    """
    samples = -(-batch // asked.microbatches)
    tried = asked.timed_on or asked.devices[0]
    by_name = plan.mapping()
    where = [asked.devices[by_name[name]] for name in network.names] if placed else tried
    units = network.units(samples, profile.times(network, where, samples))
    speed, its_source = asked.bytes_per_second, "given"
    if speed is None:
        speed = profile.bytes_per_second(*asked.devices[:2])
        its_source = "measured: a copy of {} from {} to {}".format(
            told_bytes(profile.BLOCK), *map(short_name, asked.devices[:2])
        )
    sources = (
        ("bandwidth", asked.speed_source or its_source),
        (
            "times",
            f"median of {profile.REPEATS} runs on {samples:,} samples of made-up input, one operation after the other, "
            + ("each where it is" if placed else f"on {short_name(tried)}"),
        ),
        (
            "slots",
            f"{SLOTS} for each trained weight, assumed: there is no built optimizer yet"
            if slots is None
            else "those of the optimizer",
        ),
    )
    setting = Setting(
        tuple(map(short_name, asked.devices)),
        asked.schedule,
        asked.microbatches,
        batch,
        samples,
        speed,
        asked.recompute,
        asked.memory,
        sources,
    )
    return predict(units, held(network, slots), plan, setting, network.ends, measured)


def held(network: Network, slots: Mapping[int, int] | None = None) -> list[Held]:
    """By operation: its weights, their gradients and slots. What several operations share counts at the first."""
    seen: set[int] = set()
    found = []
    for operation in network.operations:
        fresh = [v for v in operation.variables if id(v) not in seen]
        seen.update(id(v) for v in fresh)
        trained = [v for v in fresh if v.trainable]
        gradients = _bytes(trained)
        own = SLOTS * gradients if slots is None else sum(slots.get(id(v), 0) for v in trained)
        parameters = sum(int(v.value.shape.num_elements()) for v in fresh)
        found.append(Held(parameters, _bytes(fresh), gradients, own))
    return found


def short_name(device: str) -> str:
    """A device's name without what is the same for all on one machine.

    >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1"), short_name("device 3")
    ('GPU:1', 'device 3')
    """
    try:
        spec = tf.DeviceSpec.from_string(device)
    except ValueError:
        return device
    if spec.device_type is None:
        return device
    own = f"{spec.device_type}:{spec.device_index}"
    return own if spec.job in (None, "localhost") else f"{spec.job}/{spec.task}/{own}"


def _bytes(variables: Sequence[tf.Variable]) -> int:
    return sum(nbytes(v.value) for v in variables)
