"""Which operations of a model go to which device, by what the user asked for."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.planner import partition
from tfdist.planner.layout import chain, grouped
from tfdist.planner.partition import BALANCES
from tfdist.planner.plan import Plan, StagePlan
from tfdist.planner.schedule import live, order_of
from tfdist.split import profile
from tfdist.split.devices import checked_name
from tfdist.split.network import Network

MICROS_PER_WAIT = 4  # "auto": micro-batches for each stage after the first, so that a fifth of the time is waiting


@dataclass(frozen=True)
class Wishes:
    """What a strategy was asked for, checked.

    Attributes:
      devices: full names.
      balance: one of `BALANCES`, numbers of operations by stage, a mapping from names to numbers of devices, or a plan.
      microbatches: of a batch.
      schedule: "1f1b" or "gpipe".
      recompute: whether stages compute forwards again rather than keep activations.
      memory: bytes that a stage may take; infinite where nothing was said.
      batch_size: samples of a batch that the plan is made for; None: `profile.UNKNOWN` a micro-batch.
      timed_on: the device to time operations on; None: the first. To plan for devices that are not here.
      bytes_per_second: over a cut; None: as measured between the first two.
      speed_source: where that is known from.
      parts: devices of layers that are held in parts, full names, by the layer's name.
    """

    devices: Sequence[str]
    balance: Any
    microbatches: int
    schedule: str
    recompute: bool = False
    memory: float = math.inf
    batch_size: int | None = None
    timed_on: str | None = None
    bytes_per_second: float | None = None
    speed_source: str = ""
    parts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of a micro-batch, for which costs are taken."""
        return profile.UNKNOWN if self.batch_size is None else -(-self.batch_size // self.microbatches)


def wishes(
    devices: Sequence[str],
    balance: Any,
    microbatches: Any,
    schedule: str,
    recompute: bool,
    memory: float | None,
    batch_size: int | None,
) -> Wishes:
    """Checks the arguments of `ModelParallelStrategy`.

    Raises:
      ValueError: one of another form.
    """
    micros = _number("microbatches", microbatches, MICROS_PER_WAIT * (len(devices) - 1), ', or "auto"')
    order_of(schedule, chain(len(devices)), micros)
    if not isinstance(recompute, bool):
        raise ValueError(f"recompute is {recompute!r}, expected True or False.")
    if memory is not None and not (isinstance(memory, (int, float)) and memory > 0):
        raise ValueError(f"memory is {memory!r}, expected the bytes that a device may take for its stage, or None.")
    batch = checked_batch(batch_size)
    if batch is not None and batch < micros:
        if microbatches != "auto":
            raise ValueError(
                f"microbatches is {micros} for batch_size={batch}, expected at most as many as a batch has samples."
            )
        micros = batch
    if memory is not None and not (isinstance(balance, str) and balance in BALANCES):
        raise ValueError(
            f"memory={memory} goes with balance={' or '.join(map(repr, BALANCES))}, which choose a cut that keeps "
            "within it; yours is chosen. Leave memory out."
        )
    limit = math.inf if memory is None else memory
    balance, parts = _parts(balance, devices)
    return Wishes(devices, _form(balance, devices), micros, schedule, recompute, limit, batch, parts=parts)


def checked_batch(batch_size: int | None) -> int | None:
    """Raises ValueError unless it is None, or a number of samples."""
    return None if batch_size is None else _number("batch_size", batch_size, 0, ", or None")


def plan(network: Network, asked: Wishes) -> Plan:
    """The plan for a model.

    Raises:
      ValueError: it has fewer operations than there are devices, the balance does not fit it, or no cut fits in memory.
    """
    count, balance = len(asked.devices), asked.balance
    if isinstance(balance, Plan):
        balance.positions(network.names)
        return Plan(network.name, balance.stages)
    if isinstance(balance, dict):
        return _by_mapping(network, asked)
    if isinstance(balance, list):
        bounds = _by_counts(network, balance)
    else:
        tried = asked.timed_on or asked.devices[0]
        times = profile.times(network, tried, asked.samples) if balance == "time" else None
        speed = asked.bytes_per_second or profile.bytes_per_second(*asked.devices[:2]) if times else math.inf
        kept = live(order_of(asked.schedule, chain(count), asked.microbatches))
        by = "memory" if balance == "memory" else "seconds"
        bounds = partition.best_cut(
            network.units(asked.samples, times), count, kept, asked.memory, speed, by
        ).bounds
    stages = (tuple(network.names[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    return Plan(network.name, tuple(StagePlan(i, names) for i, names in enumerate(stages)))


def _by_counts(network: Network, balance: list[int]) -> tuple[int, ...]:
    if sum(balance) != len(network.names) or min(balance) < 1:
        raise ValueError(
            f"balance is {balance}, expected {len(balance)} numbers of at least 1 that add up to the model's "
            f"{len(network.names)} operations: {', '.join(network.names)}."
        )
    return partition.bounds_of(balance)


def _by_mapping(network: Network, asked: Wishes) -> Plan:
    """An operation that is not named is where the last one is that it takes from."""
    names, known = network.names, asked.balance
    unknown = [name for name in known if name not in names]
    if unknown:
        raise ValueError(f"balance names {', '.join(unknown)}, expected layers of the model: {', '.join(names)}.")
    devices: list[int] = []
    for operation in network.operations:
        inherited = devices[operation.needs[-1]] if operation.needs else known.get(names[0], 0)
        devices.append(known.get(operation.name, known.get(operation.layer.name, inherited)))
    if len(set(devices)) < 2 and not asked.parts:
        raise ValueError(
            f"balance {known} puts all layers on {asked.devices[devices[0]]}; name a layer for another device. The "
            f"model's layers are {', '.join(names)}."
        )
    stages = grouped(devices, [o.needs for o in network.operations])
    plans = [StagePlan(devices[group[0]], tuple(names[i] for i in group)) for group in stages]
    if set(network.ends) - set(stages[-1]):
        # Outputs come from several stages: the loss waits for all of them, none of them for another.
        plans.append(StagePlan(plans[-1].device, ()))
    return Plan(network.name, tuple(plans))


def _number(name: str, given: Any, auto: int, others: str) -> int:
    if given == "auto" and "auto" in others:
        return auto
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name} is {given!r}, expected a number of at least 1{others}.")
    return count


def _parts(balance: Any, devices: Sequence[str]) -> tuple[Any, dict[str, list[str]]]:
    """A mapping from names with one device each, the first where there are several, and the full names of those."""
    if not isinstance(balance, dict):
        return balance, {}
    first, parts = dict(balance), {}
    for name, given in balance.items():
        if not isinstance(name, str):
            raise ValueError(f"balance maps {name!r}, expected names of layers, such as layer.name.")
        if isinstance(given, (list, tuple)) and given:
            first[name] = given[0]
            found = [devices[_device(name, device, devices)] for device in given]
            if len(set(found)) < len(found):
                raise ValueError(f"balance maps {name!r} to {', '.join(found)}, expected each of its devices once.")
            if len(found) > 1:
                parts[name] = found
    return first, parts


def _form(balance: Any, devices: Sequence[str]) -> Any:
    """A balance as a word, a list of numbers, a mapping from names to numbers of devices, or a plan."""
    if isinstance(balance, str) and balance in BALANCES:
        return balance
    if isinstance(balance, Plan):
        if balance.devices > len(devices):
            raise ValueError(
                f"balance is a plan for {balance.devices} devices, and there are {len(devices)}: {', '.join(devices)}."
            )
        return balance
    if isinstance(balance, dict) and balance:
        return {name: _device(name, device, devices) for name, device in balance.items()}
    with contextlib.suppress(TypeError):
        if not isinstance(balance, (str, dict)) and len(balance) == len(devices):
            return [operator.index(count) for count in balance]
    raise ValueError(
        f'balance is {balance!r}, expected "time", "memory", "parameters", {len(devices)} numbers of operations (one '
        "for each device), a mapping from names of layers to devices, or several devices each, or a tfdist.Plan."
    )


def _device(name: str, device: Any, devices: Sequence[str]) -> int:
    if isinstance(device, str):
        return devices.index(checked_name(device, devices))
    number = -1
    if not isinstance(device, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(device)
    if not 0 <= number < len(devices):
        raise ValueError(
            f"balance puts {name!r} on device {device!r}, expected a number from 0 to {len(devices) - 1}, or one of: "
            f"{', '.join(devices)}."
        )
    return number
