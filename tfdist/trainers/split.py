"""What `ModelParallelStrategy.distribute` mixes into a model: the step of training over its stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private, private_variables
from tfdist.data.share import rows
from tfdist.planner.layout import Layout, layout_of
from tfdist.planner.plan import Plan
from tfdist.planner.schedule import order_of
from tfdist.ps.slots import Slots
from tfdist.split.devices import check_home
from tfdist.split.network import Network
from tfdist.split.parts import Part, expanded, is_whole
from tfdist.split.pipeline import Pipeline
from tfdist.split.planning import Wishes, plan
from tfdist.split.stages import Stage, forward
from tfdist.trainers import keeping, split_losses, split_parts, split_slots
from tfdist.trainers.arguments import arguments, refuse_jit
from tfdist.trainers.models import given, mix
from tfdist.trainers.pace import Pace
from tfdist.trainers.split_optimizer import SplitOptimizer
from tfdist.trainers.swap import has, swap

NO_XLA = "a step over several devices cannot be one XLA program. Leave it out or pass jit_compile=False."


class Split:
    """What a distributed model knows of its stages.

    Attributes:
      strategy: whose it is.
      network, stages: its operations, and where they are.
      layout: how they hang together.
      wishes: what the strategy was asked for.
      plan: what came of it.
      tracing: whether its own step is being traced, in which the losses of layers are counted by stage.
      pace: how long its steps take.
      optimizer: what is mixed into the model's optimizers.
    """

    def __init__(
        self, strategy: Any, network: Network, stages: list[Stage], layout: Layout, wishes: Wishes, plan: Plan
    ) -> None:
        self.strategy, self.network, self.stages, self.layout = strategy, network, stages, layout
        self.wishes, self.plan = wishes, plan
        self.tracing = False
        self.pace = Pace()
        self.optimizer: type = SplitOptimizer


class SplitTrainer:
    """Mixed into a `keras.Model`; `self` stays the user's Sequential or functional model."""

    @property
    def _tfdist_split(self) -> Split:
        return self.__dict__["_tfdist"]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        refuse_jit(super().compile, args, kwargs, NO_XLA)
        super().compile(*args, **kwargs)
        adopt(self)

    def call(self, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        state = self._tfdist_split
        if any(isinstance(t, keras.KerasTensor) for t in keras.tree.flatten(inputs)):
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = keras.tree.flatten(inputs)
        for tensor, its in zip(flat, keras.tree.flatten(mask) if mask is not None else [None] * len(flat), strict=True):
            if its is not None:
                private.set_mask(tensor, its)
        return forward(state.stages, state.network, inputs, bool(training))

    @property
    def losses(self) -> list[Any]:
        """Losses that layers have added, as everywhere; none while the stages count them."""
        return [] if self._tfdist_split.tracing else super().losses

    def train_step(self, data: Any) -> Any:
        state = self._tfdist_split
        split_losses.adopt(self)
        # Outside of graphs Keras passes arrays on as they are.
        data = keras.tree.map_structure(lambda t: tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        state.pace.saw(rows(x))
        asked = state.wishes
        order = order_of(asked.schedule, state.layout, asked.microbatches)
        joined = asked.schedule == "gpipe"

        loss = functools.partial(split_losses.of_part, self)
        scale = self.optimizer.scale_loss(tf.ones(()))
        state.tracing = True
        try:
            step = Pipeline(
                state.network,
                state.stages,
                state.layout,
                order,
                loss,
                joined,
                scale,
                asked.recompute,
                split_losses.agreed,
            )
            done = step.run((x, y, sample_weight))
        finally:
            state.tracing = False
        private.track_loss(self, done.loss, rows(x))
        for variable, value in done.state:
            variable.assign(value)
        variables = expanded(self.trainable_variables)
        if variables:
            self.optimizer.apply_gradients([(done.gradients.get(id(v)), v) for v in variables])
        return self.compute_metrics(x, y, done.outputs, sample_weight=sample_weight)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        keeping.saw_data(self, iterator)
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

    def make_train_function(self, force: bool = False) -> Any:
        before, pace = self.train_function, self._tfdist_split.pace
        super().make_train_function(force)
        pace.begin()
        if self.train_function is not before:
            self.train_function = pace.watched(self.train_function, self.steps_per_execution)
        return self.train_function

    def reset_metrics(self) -> None:
        self._tfdist_split.pace.pause()  # Keras calls it first in each epoch
        super().reset_metrics()


class TaskTrainer(SplitTrainer):
    """As `ModelParallelStrategy` mixes it in: calls that other tasks take part in are watched.

    Not on a ring, whose own trainer stands in front, and whose ranks have deadlines of their own.
    """

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().fit, args, kwargs)
        with self._tfdist_watching("fit", call["x"], call["validation_data"]), keeping.kept(self, call):
            return super().fit(**call)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().evaluate, args, kwargs)
        with self._tfdist_watching("evaluate", call["x"]):
            return super().evaluate(**call)

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().predict, args, kwargs)
        with self._tfdist_watching("predict", call["x"]):
            return super().predict(**call)

    @functools.wraps(keras.Model.quantize)
    def quantize(self, *args: Any, **kwargs: Any) -> Any:
        if parts := self._tfdist_split.wishes.parts:
            raise ValueError(
                f"{', '.join(parts)} of model {self.name!r} is held in parts, which cannot be quantized. Save the "
                "model, load it without the strategy, and quantize that."
            )
        return super().quantize(*args, **kwargs)

    @functools.wraps(keras.Model.save)
    def save(self, *args: Any, **kwargs: Any) -> Any:
        with self._tfdist_watching("save"):
            return super().save(*args, **kwargs)

    @contextlib.contextmanager
    def _tfdist_watching(self, what: str, *data: Any) -> Iterator[None]:
        strategy = self._tfdist_split.strategy
        with strategy.watching(what), strategy.reading(*data):
            yield


def plan_of(model: Any) -> Plan | None:
    """Of a model that was distributed; None where it was not."""
    return model._tfdist_split.plan if has(model, SplitTrainer) else None


def distribute(model: Any, strategy: Any, wishes: Wishes) -> Any:
    """See `ModelParallelStrategy.distribute`."""
    model = given(model, strategy, SplitTrainer)
    if has(model, SplitTrainer):
        return model
    mix(model, strategy, TaskTrainer, cut(model, strategy, wishes, plan), adopt, NO_XLA)
    settle(model)
    return model


def cut(model: Any, strategy: Any, wishes: Wishes, planned: Callable[[Network, Wishes], Plan]) -> Split:
    """A model's stages, see `distribute`, by the plan that `planned` makes; only layers in parts are changed.

    Raises:
      ValueError: it cannot be cut, or its optimizer keeps slots that cannot be moved.
    """
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"Model {model.name!r} has a train_step of its own, which knows nothing of stages. Train it with "
            "RingAllReduceStrategy, or without one."
        )
    network = Network(model)
    check_home(model)
    stateful = [layer.name for layer in private.layers_of(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise ValueError(
            f"{', '.join(stateful)} of model {model.name!r} keeps state from batch to batch, sample by sample, which "
            "micro-batches take apart. Leave out stateful=True, or train without this strategy."
        )
    for optimizer in optimizers_of(model):
        slots_of(optimizer)  # which raises before anything is changed
    found = planned(network, wishes)
    held = split_parts.checked(network, wishes.parts)
    for optimizer in optimizers_of(model) if held else ():
        split_slots.check_optimizer(optimizer)
    positions = found.positions(network.names)
    last = len(positions) - 1
    stages = [
        Stage(i, lane, wishes.devices[lane], [network.operations[p] for p in mine], network, last=i == last)
        for i, (mine, lane) in enumerate(zip(positions, (s.device for s in found.stages), strict=True))
    ]
    needs = [operation.needs for operation in network.operations]
    layout = layout_of(positions, [stage.lane for stage in stages], needs, network.ends)
    split_parts.hold(held)
    return Split(strategy, network, stages, layout, wishes, found)


def adopt(model: Any) -> None:
    """Takes in what `compile` gave the model.

    Raises:
      ValueError: its layers are others than they were.
    """
    if not getattr(model, "compiled", False):
        return
    state = model._tfdist_split
    if getattr(model, "_functional", state.network.functional) not in (state.network.functional, None):
        raise ValueError(
            f"Model {model.name!r} got or lost layers after it was distributed. Build it anew, and distribute it last."
        )
    for optimizer in optimizers_of(model):
        if any(is_whole(v) for v in model.variables):
            split_slots.check_optimizer(optimizer)
            split_slots.cut_slots(optimizer)
        swap(optimizer, state.optimizer)
    settle(model)
    if model.jit_compile:
        model.jit_compile = False


def settle(model: Any) -> None:
    """Moves variables, and the slots that there are, to the device of the first stage that reads them."""
    known: set[int] = set()
    for stage in model._tfdist_split.stages:
        for variable in stage.variables:
            apart = isinstance(variable, Part) or id(variable) in known
            if not apart and variable.value.device != stage.device:
                private_variables.place(variable, stage.device)
            known.add(id(variable))
    for optimizer in optimizers_of(model):
        for variable, row in zip(private.trained_by(optimizer), slots_of(optimizer), strict=False):
            for slot in row.values():
                if slot.value.device != variable.value.device:
                    private_variables.place(slot, variable.value.device)
        private_variables.reindex(optimizer)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of `compile`, and the one inside it that scaling of the loss has."""
    outer = model.optimizer if getattr(model, "compiled", False) else None
    return [o for o in (outer, getattr(outer, "inner_optimizer", None)) if o is not None]


def slots_of(optimizer: Any) -> list[dict[str, Any]]:
    """By variable that the optimizer was built on, its slots by name; none where it is not built, or has one inside."""
    if not optimizer.built or hasattr(optimizer, "inner_optimizer"):
        return []
    wholes = [id(v) for v in optimizer.variables if is_whole(v)]  # whose parts are the slots
    return Slots(optimizer, len(private.trained_by(optimizer)), wholes).rows
