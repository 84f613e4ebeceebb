"""What `ModelParallelStrategy.distribute` mixes into a model: the step of training over its stages."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.planner.schedule import order_of
from tfdist.ps.slots import Slots
from tfdist.split.network import Network
from tfdist.split.pipeline import Pipeline
from tfdist.split.stages import Stage, forward
from tfdist.trainers import split_losses
from tfdist.trainers.arguments import refuse_jit
from tfdist.trainers.models import given, mix, other_strategy
from tfdist.trainers.swap import has, swap

NO_XLA = "a step over several devices cannot be one XLA program. Leave it out or pass jit_compile=False."


class Split:
    """What a distributed model knows of its stages.

    Attributes:
      strategy: whose it is.
      network, stages: its operations, and where they are.
      micros: micro-batches of a batch.
      schedule: "1f1b" or "gpipe".
      tracing: whether its own step is being traced, in which the losses of layers are counted by stage.
    """

    def __init__(self, strategy: Any, network: Network, stages: list[Stage], micros: int, schedule: str) -> None:
        self.strategy, self.network, self.stages = strategy, network, stages
        self.micros, self.schedule = micros, schedule
        self.tracing = False


class SplitTrainer:
    """Mixed into a `keras.Model`; `self` stays the user's Sequential or functional model."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        refuse_jit(super().compile, args, kwargs, NO_XLA)
        super().compile(*args, **kwargs)
        adopt(self)

    def call(self, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        state = self.__dict__["_tfdist"]
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
        return [] if self.__dict__["_tfdist"].tracing else super().losses

    def train_step(self, data: Any) -> Any:
        state = self.__dict__["_tfdist"]
        split_losses.adopt(self)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        order = order_of(state.schedule, len(state.stages), state.micros)
        joined = state.schedule == "gpipe"

        loss = functools.partial(split_losses.of_part, self)
        scale = self.optimizer.scale_loss(tf.ones(()))
        state.tracing = True
        try:
            done = Pipeline(state.network, state.stages, order, loss, joined, scale).run((x, y, sample_weight))
        finally:
            state.tracing = False
        private.track_loss(self, done.loss, tf.shape(next(t for t in keras.tree.flatten(x) if t is not None))[0])
        for variable, value in done.state:
            variable.assign(value)
        variables = self.trainable_variables
        if variables:
            self.optimizer.apply_gradients([(done.gradients.get(id(v)), v) for v in variables])
        return self.compute_metrics(x, y, done.outputs, sample_weight=sample_weight)


class SplitOptimizer:
    """Mixed into the optimizer of `compile`: its slots are, and its arithmetic happens, where its variables are."""

    def add_variable_from_reference(self, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(_device(reference_variable)):
            return super().add_variable_from_reference(reference_variable, *args, **kwargs)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(_device(variable)):
            return super().update_step(gradient, variable, learning_rate)


def _device(variable: Any) -> str:
    """Keras hands its optimizers variables of its own at some places, and TensorFlow's at others."""
    return (variable if isinstance(variable, tf.Variable) else variable.value).device


def distribute(model: Any, strategy: Any, plan: Any, micros: int, schedule: str) -> Any:
    """See `ModelParallelStrategy.distribute`. `plan` gives the stages' bounds and devices for a network."""
    model = given(model, strategy)
    if has(model, SplitTrainer) and model.__dict__["_tfdist"].strategy is strategy:
        return model
    if "_tfdist" in model.__dict__:
        raise other_strategy(model)
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"Model {model.name!r} has a train_step of its own, which knows nothing of stages. Train it with "
            "RingAllReduceStrategy, or without one."
        )
    network = Network(model)
    bounds, devices = plan(network)
    stages = [
        Stage(i, device, network.operations[a:b], network, last=i == len(devices) - 1)
        for i, ((a, b), device) in enumerate(zip(itertools.pairwise(bounds), devices, strict=True))
    ]
    placed: set[int] = set()
    for stage in stages:
        for variable in stage.variables:
            if id(variable) not in placed:
                placed.add(id(variable))
                private.place(variable, stage.device)
    mix(model, strategy, SplitTrainer, Split(strategy, network, stages, micros, schedule), adopt, NO_XLA)
    return model


def adopt(model: Any) -> None:
    """Takes in what `compile` gave the model."""
    if not getattr(model, "compiled", False):
        return
    optimizer = model.optimizer
    if optimizer is not None and not has(optimizer, SplitOptimizer):
        swap(optimizer, SplitOptimizer)
        if optimizer.built:
            variables = model.trainable_variables
            for variable, row in zip(variables, Slots(optimizer, len(variables)).rows, strict=True):
                for slot in row.values():
                    private.place(slot, variable.value.device)
    if model.jit_compile:
        model.jit_compile = False
