"""The optimizer of a model over several devices: slots, gradients and arithmetic are where the variables are.

The optimizer stays the user's. Between the backward and the update Keras would bring all gradients to the strategy's
device: to unscale, accumulate, clip and "reduce" them, and to let weights decay and averages move.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import sparse
from tfdist.ps.clipping import clipped
from tfdist.ps.layout import Holding, Piece
from tfdist.split.parts import Part, expanded
from tfdist.trainers.split_slots import join_slots


class Gradient:
    """A gradient on its way through Keras' arithmetic, which is done on the device of its variable.

    Attributes:
      tensor: or `tf.IndexedSlices`.
      variable: a Keras variable.
    """

    def __init__(self, tensor: Any, variable: Any) -> None:
        self.tensor, self.variable = tensor, variable

    @property
    def device(self) -> str:
        return self.variable.value.device

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.tensor, dtype, name=name)

    def __truediv__(self, by: Any) -> Gradient:
        with tf.device(self.device):
            return Gradient(sparse.on_values(self.tensor, lambda v: v / tf.cast(by, v.dtype)), self.variable)

    def __add__(self, accumulated: Any) -> Gradient:
        with tf.device(self.device):
            return Gradient(tf.convert_to_tensor(self.tensor) + accumulated.value, self.variable)


class PlacedOptimizer:
    """Slots are, and updates happen, where their variables are."""

    def add_variable_from_reference(self, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(_device(reference_variable)):
            return super().add_variable_from_reference(reference_variable, *args, **kwargs)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(_device(variable)):
            return super().update_step(gradient, variable, learning_rate)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        # Keras' own asks the optimizer's strategy, whose scope would be a second one within the model's.
        variables = expanded(trainable_variables)
        for variable, average in zip(variables, self._model_variables_moving_average, strict=True):
            if average is not None:
                with tf.device(_device(variable)):
                    variable.assign(average.value)


class SplitOptimizer(PlacedOptimizer):
    """Mixed into the optimizer of `compile`, and into the one inside it where that scales the loss, of one process."""

    def build(self, variables: Any) -> None:
        super().build(expanded(variables))
        if not hasattr(self, "inner_optimizer"):
            join_slots(self)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        given = private.trained_by(self) if trainable_variables is None else trainable_variables
        variables = expanded(given)
        if not len(grads) or hasattr(self, "optimizers"):  # those of Keras' MultiOptimizer compute by themselves
            return super().apply(grads, variables)
        pairs = zip(grads, variables, strict=True)
        held = [g if g is None or isinstance(g, Gradient) else Gradient(g, variable) for g, variable in pairs]
        return super().apply(held, variables)

    def _clip_gradients(self, grads: Any) -> list[Any]:
        """Clipped as whole weights' gradients are; from here on plain tensors."""
        wholes = [getattr(g.variable, "whole", g.variable) for g in grads]
        index = {id(whole): i for i, whole in enumerate(wholes)}
        places = []
        for gradient, whole in zip(grads, wholes, strict=True):
            holding = Holding(0, gradient.tensor.dtype.name, (Piece(index[id(whole)], 0, 0),), alone=True)
            places.append(SimpleNamespace(device=gradient.device, holdings=[holding]))
        return [mine for (mine,) in clipped(self, places, [[g.tensor] for g in grads])]

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars  # of one process, which need not meet on one device

    def _use_weight_decay(self, variable: Any) -> bool:
        known = variable.whole if isinstance(variable, Part) else variable
        return super()._use_weight_decay(known.value if isinstance(known, keras.Variable) else known)

    def _apply_weight_decay(self, variables: Any) -> None:
        if self.weight_decay is None:
            return
        for variable in variables:
            if self._use_weight_decay(variable):
                value = variable.value
                with tf.device(value.device):
                    value.assign_sub(
                        value * tf.cast(self.weight_decay, value.dtype) * tf.cast(self.learning_rate, value.dtype)
                    )

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        for gradient, accumulated in zip(grads, acc_grads, strict=True):
            with tf.device(gradient.device):
                accumulated.assign((gradient + accumulated).tensor)

    def _backend_reset_gradient_accumulators(self) -> None:
        for accumulated in self._accumulated_gradients:
            with tf.device(accumulated.value.device):
                accumulated.assign(tf.zeros(accumulated.shape, accumulated.dtype))

    def _update_model_variables_moving_average(self, trainable_variables: Any) -> None:
        if not self.use_ema:
            return
        for variable, average in zip(trainable_variables, self._model_variables_moving_average, strict=True):
            if average is None:
                continue
            with tf.device(average.value.device):
                later = tf.cast(tf.not_equal(self.iterations, 0), average.dtype)  # the first value is taken as it is
                kept = later * tf.cast(self.ema_momentum, average.dtype)
                average.assign(kept * average.value + (1 - kept) * variable.value)

    def check_finite(self, grads: Any) -> tf.Tensor:
        found = []
        for gradient in (g for g in grads if g is not None):
            with tf.device(gradient.device):
                tensor = gradient.tensor
                values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
                found.append(tf.reduce_all(tf.math.is_finite(values)))
        return tf.reduce_all(found)

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        self.inner_optimizer.apply([g if g is None else g / self.dynamic_scale for g in grads], trainable_variables)
        super()._stateful_handle_finite_grads([], [])  # the scale's own part of it


def _device(variable: Any) -> str:
    """Keras hands its optimizers variables of its own at some places, and TensorFlow's at others."""
    return (variable if isinstance(variable, tf.Variable) else variable.value).device
