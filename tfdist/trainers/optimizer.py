"""Optimizers of a distributed model: where the ranks' gradients become one.

The order inside `Optimizer.apply` decides exactness. Keras' TensorFlow backend sums over replicas *after*
clipping; here::

    loss x weight  ->  gradients  ->  [accumulate]  ->  SUM over ranks  ->  clip  ->  decay  ->  update
    scale_loss                                          _clip_gradients

so that clipping sees the gradient of the joined batch and accumulation costs no traffic. With dynamic loss
scaling the sum comes before the finite check (an Inf of one rank is then an Inf of all); only with accumulation
besides does one flag travel each step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import sparse
from tfdist.comm.reducer import GradientReducer
from tfdist.trainers.step import Step, current
from tfdist.trainers.swap import swap
from tfdist.trainers.switchboard import unnumbered


class OptimizerState:
    """What a distributed optimizer remembers: its reducer, its key, the model's switchboard."""

    def __init__(self, ring: Any, key: str) -> None:
        self.ring = ring
        self.key = key
        self.base_rate: float | None = None  # of LinearScaling: the learning rate before it changed it
        self.ramp: tuple[float, int] | None = None  # of LinearScaling over a schedule: (factor, updates)
        self.variables: list[Any] = []  # of the gradients that the next `reduce` gets
        self._reducer: GradientReducer | None = None

    def reduce(self, gradients: list[Any], step: Step) -> list[Any]:
        """The sum over ranks of weighted gradients; the step's small facts ride along."""
        if self._reducer is None:
            self._reducer = self.ring.make_reducer()
        names = [unnumbered(getattr(v, "path", v.name)) for v in self.variables]
        if len(names) != len(gradients):
            names, places = [f"gradient {i}" for i in range(len(gradients))], None
        else:
            places = self.ring.places(self.variables)
            for gradient, variable in zip(gradients, self.variables, strict=True):
                if isinstance(gradient, tf.Tensor):  # shape inference may have lost what the variable knows
                    gradient.set_shape(variable.shape)
        facts = None if step.facts_sent else self.ring.facts(step)
        step.facts_sent = True
        summed, known = self._reducer.reduce(list(gradients), names, f"{step.key}/{self.key}", facts, places)
        if known is not None:
            self.ring.learn(known, step)
        return summed


class RingOptimizer:
    """Mixed into every Keras optimizer of a distributed model."""

    def scale_loss(self, loss):
        step = current()
        if step is not None and step.probed is None:
            step.weighted.add(id(self))
            loss = loss * tf.cast(step.weight, loss.dtype)
        return super().scale_loss(loss)

    def apply(self, grads, trainable_variables=None):
        step = current()
        if step is not None and step.probed is not None:
            step.probed.append([g for g in grads if g is not None])
            return None
        if step is not None:
            step.applied = True
            grads = self._tfdist_weighted(list(grads), step)
        elif self.__dict__["_tfdist"].ring.comm.size == 1:
            # As on many ranks, where the rows of a sparse gradient are summed before the update.
            grads = [_once_a_row(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        return super().apply(grads, trainable_variables)

    def _get_current_learning_rate(self):
        rate = super()._get_current_learning_rate()
        ramp = self.__dict__["_tfdist"].ramp if "_tfdist" in self.__dict__ else None
        if ramp is None:
            return rate
        factor, warmup = ramp
        part = tf.minimum(tf.cast(self.iterations, tf.float32) / max(warmup, 1), 1.0) if warmup else 1.0
        return rate * (1.0 + (factor - 1.0) * part)

    def _tfdist_weighted(self, grads: list[Any], step: Step) -> list[Any]:
        if id(self) in step.weighted:
            return grads
        self.__dict__["_tfdist"].ring.check_late_weight(step)
        return step.weigh(grads)

    def _filter_empty_gradients(self, grads, vars):
        grads, kept = super()._filter_empty_gradients(grads, vars)
        self.__dict__["_tfdist"].variables = list(kept)
        return grads, kept

    def _clip_gradients(self, grads):
        step = current()
        state = self.__dict__["_tfdist"]
        if step is None and state.ring.strategy.extended.inside_run:
            # A custom loop: the sum of what the ranks computed, as in tf.distribute, but before clipping.
            grads = tf.distribute.get_replica_context().all_reduce("sum", list(grads))
        elif step is not None and id(self) not in step.reduced:
            grads = state.reduce(grads, step)
        return super()._clip_gradients(grads)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars  # summed before they were clipped


class RingLossScaleOptimizer(RingOptimizer):
    """Dynamic loss scaling: all ranks see the same finite check, so none skips a step that others take."""

    def apply(self, grads, trainable_variables=None):
        step = current()
        if step is not None and step.probed is not None:
            return super().apply(grads, trainable_variables)
        if step is not None:
            step.applied = True
            grads = self._tfdist_weighted(list(grads), step)
            inner = self.inner_optimizer
            step.weighted.add(id(inner))
            if not inner.gradient_accumulation_steps:
                state = inner.__dict__["_tfdist"]
                state.variables = list(trainable_variables or self._trainable_variables)
                grads = state.reduce(grads, step)
                step.reduced.add(id(inner))
        return super(RingOptimizer, self).apply(grads, trainable_variables)

    def check_finite(self, grads):
        finite = super().check_finite(grads)
        step, ring = current(), self.__dict__["_tfdist"].ring
        if step is not None and step.probed is None and self.inner_optimizer.gradient_accumulation_steps:
            name = step.name("finite")
        elif step is None and ring.strategy.extended.inside_run:
            name = ring.strategy.extended.name_call("finite")
        else:
            return finite  # of gradients that were summed before
        return tf.cast(ring.comm.all_reduce(tf.cast(finite, tf.int32), name, "min"), tf.bool)


def _once_a_row(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    with tf.device(gradient.values.device):
        return sparse.deduplicate(gradient)


def adopt(optimizer: Any, ring: Any, key: str) -> None:
    """Makes a Keras optimizer (and the one inside a LossScaleOptimizer) part of a distributed model."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        adopt(optimizer.inner_optimizer, ring, f"{key}/inner")
        swap(optimizer, RingLossScaleOptimizer)
    else:
        swap(optimizer, RingOptimizer)
    if "_tfdist" not in optimizer.__dict__ or optimizer.__dict__["_tfdist"].ring is not ring:
        optimizer.__dict__["_tfdist"] = OptimizerState(ring, key)
    private.set_strategy(optimizer, ring.strategy)
