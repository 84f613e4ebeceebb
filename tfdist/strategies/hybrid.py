"""A ring of split models: each rank holds one replica, over several devices."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

from tfdist import devices
from tfdist.cluster import World
from tfdist.planner.outlook import Report
from tfdist.planner.plan import Plan
from tfdist.split import planning
from tfdist.split.network import Network
from tfdist.strategies.model_parallel import ModelParallelStrategy
from tfdist.strategies.ring import RingAllReduceStrategy
from tfdist.trainers import hybrid as mixing
from tfdist.trainers import split_report as reporting
from tfdist.trainers.handshake import told_by_all
from tfdist.trainers.split import plan_of


class HybridStrategy(RingAllReduceStrategy):
    """Data and model parallel training: a ring of ranks, each with a replica that is split over devices of its own.

    A rank computes the gradient of its share of each global batch as `ModelParallelStrategy` does, in stages and
    micro-batches. The gradients of each stage are summed with those of the other ranks' same stage as soon as its last
    backward is done, while the stages before it go on.

    ```python
    strategy = tfdist.HybridStrategy(model_parallel=2)
    with strategy.scope():
        model = strategy.distribute(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64 * strategy.num_replicas_in_sync)
    ```

    Local rank r of a host has its GPUs r * d up to (r + 1) * d - 1, where d is the number of devices a rank, and knows
    them as /GPU:0 up to /GPU:d-1. Without GPUs each rank has logical CPUs. Rank 0 prints who has which.

    Args:
      model_parallel: the number of devices a rank, or a mapping with that number as "devices" and the other arguments
        of `ModelParallelStrategy`, such as `{"devices": 2, "microbatches": 8}`. Rank 0 measures and cuts, for all.
      ring: a mapping of arguments of `RingAllReduceStrategy`, such as `{"compression": "fp16"}`.

    Attributes:
      model_parallel: the `ModelParallelStrategy` of this rank's replica.

    Raises:
      ValueError: an argument that is not one of these, too few GPUs on this host for all of its ranks, or a Keras
        backend other than TensorFlow.
      RuntimeError: Horovod is missing although several processes were started, or TensorFlow has started already.
    """

    def __init__(self, *, model_parallel: int | Mapping[str, Any], ring: Mapping[str, Any] | None = None) -> None:
        self._split_options = _options("model_parallel", model_parallel, ModelParallelStrategy)
        self._split_options["devices"] = _count(self._split_options.get("devices"))
        super().__init__(**_options("ring", {} if ring is None else ring, RingAllReduceStrategy))
        comm = self.extended.comm
        told = told_by_all(comm, "the devices of HybridStrategy", self._names)
        if comm.rank == 0:
            ranks = "; ".join(
                f"rank {r} ({host}): {names}" for r, (host, names) in enumerate(zip(comm.hosts, told, strict=True))
            )
            print(f"tfdist: {comm.size} x {len(self.devices)} devices: {ranks}", flush=True)

    def _claim(self, world: World) -> None:
        gpus = devices.claim_several(world, self._split_options["devices"])
        batch = self._split_options.get("batch_size")
        if type(batch) is int:  # of all ranks together
            self._split_options["batch_size"] = -(-batch // world.size)
        # Logical CPUs can only be made before TensorFlow starts, as it does when the ranks meet.
        self.model_parallel = ModelParallelStrategy(**self._split_options)
        names = gpus or [f"{name} (logical)" for name in self.devices]
        self._names = ", ".join(":".join(name.split(":")[-2:]) for name in names)

    @property
    def devices(self) -> list[str]:
        """Full names of this rank's devices, as TensorFlow counts them here."""
        return self.model_parallel.devices

    def plan(self, model: Any) -> Plan:
        """Where a model is cut, or will be: nothing is changed. All ranks have to call it.

        Raises:
          ValueError: as `distribute`.
        """
        known = plan_of(model)
        return known or mixing.agreed_plan(self.extended.comm, Network(model), self.model_parallel.wishes)

    def report(self, model: Any, batch_size: int | None = None) -> Report:
        """Of one rank's replica, as `ModelParallelStrategy.report`; the sums between ranks are not in it.

        Args:
          model: distributed, or not yet: then all ranks have to call it.
          batch_size: samples of a batch of all ranks together; None as there.

        Raises:
          ValueError: as `distribute`.
        """
        batch = planning.checked_batch(batch_size)
        share = None if batch is None else -(-batch // self.extended.comm.size)
        return reporting.report(model, self.model_parallel.wishes, share, self.plan(model))

    def distribute(self, model: Any) -> Any:
        """Cuts a Sequential or functional model into stages, alike on all ranks, which all have to call it.

        Args:
          model: a `keras.Model`, compiled or not, or a function without arguments that builds one (called inside the
            scope).

        Returns:
          the same object, still of its own class.

        Raises:
          ValueError: on every rank: a model with a `call` or `train_step` of its own, more devices than operations, a
            balance that does not fit it, no cut that keeps within `memory`, or models that differ between ranks.
        """
        distributed = mixing.distribute(model, self, self.model_parallel.wishes)
        self.extended.distributed.add(distributed)
        return distributed


def _options(name: str, given: Any, strategy: type) -> dict[str, Any]:
    """What was given as arguments of a strategy, by name; a number alone is one of devices.

    Raises:
      ValueError: it is something else, or holds arguments that the strategy does not have.
    """
    known = [p for p in inspect.signature(strategy.__init__).parameters if p != "self"]
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ValueError(
                f"{name} has {', '.join(map(repr, unknown))}; known are {', '.join(map(repr, known))}, which are "
                f"arguments of {strategy.__name__}."
            )
        return dict(given)
    if "devices" in known:
        return {"devices": given}
    raise ValueError(
        f"{name} is {given!r}, expected a mapping of arguments of {strategy.__name__}: {', '.join(known)}."
    )


def _count(given: Any) -> int:
    """The number of devices a rank.

    Raises:
      ValueError: it is no number from 2 on.
    """
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 2:
        raise ValueError(
            f"model_parallel asks for {given!r} as devices, expected their number for each rank, from 2 on: "
            'model_parallel=2, or {"devices": 2, "microbatches": 8}. Which ones a rank gets follows from its place on '
            "its host."
        )
    return count
