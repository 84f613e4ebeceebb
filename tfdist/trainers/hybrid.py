"""What `HybridStrategy.distribute` mixes into a model: a rank's share, computed by stages, its gradients summed.

The two trainers stand one inside the other::

    RingTrainer   fit: this rank's share of each batch, its weight, ghosts, logs, files
    SplitTrainer  train_step: the share in micro-batches through the stages

and so do the mixins of optimizers (the ring's sum, then each variable's update on its device) and of losses (a
micro-batch's part of a rank's part of the batch).
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist import private
from tfdist.comm import watch
from tfdist.comm.reducer import Place
from tfdist.planner.plan import Plan, StagePlan
from tfdist.split import planning
from tfdist.split.network import Network
from tfdist.split.planning import Wishes
from tfdist.trainers import handshake, ring, split
from tfdist.trainers.models import given, mix
from tfdist.trainers.split_optimizer import PlacedOptimizer
from tfdist.trainers.swap import has
from tfdist.trainers.switchboard import Switchboard, of, unnumbered


class HybridBoard(Switchboard):
    """A switchboard of a model that is split; `split` is what is known of its stages."""

    def __init__(self, model: keras.Model, strategy: Any, key: str, its_split: split.Split) -> None:
        super().__init__(model, strategy, key)
        self.split = its_split
        its_split.optimizer = PlacedOptimizer  # the ring's own is around it, and deals with gradients

    def places(self, variables: list[Any]) -> list[Place]:
        """The stage of each variable, by its index, and its device; a variable of the model alone is the first's."""
        first = self.split.stages[0]
        found: dict[int, Place] = {}
        for stage in self.split.stages:
            for variable in stage.variables:
                for known in (variable, variable.value):  # optimizers have either
                    found.setdefault(id(known), (stage.index, stage.device))
        return [found.get(id(v), (first.index, first.device)) for v in variables]


class HybridTrainer(ring.RingTrainer, split.SplitTrainer):
    """Mixed into a `keras.Model`; `self` stays the user's Sequential or functional model."""

    @property
    def _tfdist_split(self) -> split.Split:
        return of(self).split


def distribute(model: Any, strategy: Any, wishes: Wishes) -> Any:
    """See `HybridStrategy.distribute`."""
    model = given(model, strategy, HybridTrainer)
    if has(model, HybridTrainer):
        return model
    if wishes.parts:
        raise ValueError(
            f"balance holds {', '.join(wishes.parts)} in parts on several devices, which HybridStrategy does not: give "
            "the layer one device, or train with ModelParallelStrategy."
        )
    comm = strategy.extended.comm
    together = [
        layer.name
        for layer in private.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    ]
    if together and comm.size > 1:
        raise ValueError(
            f"{', '.join(together)} of model {model.name!r}: BatchNormalization(synchronized=True) normalizes by the "
            "samples of all ranks, but those of a split model are in micro-batches, which need not be even between "
            "ranks. Leave synchronized out: each micro-batch of a rank is normalized by itself."
        )
    key = f"model{next(strategy.extended.models)}"
    board = HybridBoard(model, strategy, key, split.cut(model, strategy, wishes, functools.partial(agreed_plan, comm)))
    mix(model, strategy, HybridTrainer, board, adopt, ring.NO_XLA)
    split.settle(model)
    return model


def adopt(model: Any) -> None:
    """Takes in what `compile` gave the model, stages first: the ring's sum is the outer of an optimizer's mixins."""
    split.adopt(model)
    ring.adopt(model)


def agreed_plan(comm: Any, network: Network, wishes: Wishes) -> Plan:
    """Rank 0's plan, which it may have measured, on every rank; all call it.

    Operations travel as positions, since Keras' numbers in their names may differ between ranks.

    Raises:
      ValueError: rank 0's error, on every rank, or the ranks' models differ.
    """
    what = f"the plan of {unnumbered(network.name)!r}"
    told: dict[str, Any] = {"operations": [unnumbered(name) for name in network.names]}
    error: ValueError | None = None
    if comm.rank == 0:
        with watch.busy(what):
            try:
                own = planning.plan(network, wishes)
                stages = zip(own.stages, own.positions(network.names), strict=True)
                told["_stages"] = [[stage.device, positions] for stage, positions in stages]
            except ValueError as raised:
                error, told["_error"] = raised, str(raised)
    of_root = handshake.compare(comm, what, told)
    if error is not None:
        raise error
    if "_error" in of_root:
        raise ValueError(of_root["_error"])
    names = network.names
    return Plan(
        network.name,
        tuple(StagePlan(device, tuple(names[p] for p in positions)) for device, positions in of_root["_stages"]),
    )
