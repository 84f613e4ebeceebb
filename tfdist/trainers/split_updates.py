"""The optimizer of a model with weights in parts (`split.parts`): it updates parts, and shows and saves whole slots.

It is built on parts, so its slots are of parts, on their devices. In its list of variables, which is what is saved,
stands one for each slot that plain Keras would have, whose value is that of the parts'. Whatever Keras computes with
gradients between the backward and the update is done where the variable is.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import sparse
from tfdist.ps.clipping import clipped
from tfdist.ps.layout import Holding, Piece
from tfdist.ps.slots import ELEMENTWISE, Slots, is_elementwise
from tfdist.split.parts import Part, Parts, Whole, cut, expanded, is_whole, parts_of
from tfdist.trainers.swap import has, swap


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

    def __truediv__(self, by: Any) -> Gradient:
        with tf.device(self.device):
            return Gradient(sparse.on_values(self.tensor, lambda v: v / tf.cast(by, v.dtype)), self.variable)

    def __add__(self, accumulated: Any) -> Gradient:
        with tf.device(self.device):
            return Gradient(tf.convert_to_tensor(self.tensor) + accumulated.value, self.variable)


class PartedOptimizer:
    """Mixed into an optimizer that updates elements one by one, and into one that scales the loss around it."""

    def build(self, variables: Any) -> None:
        super().build(expanded(variables))
        if not hasattr(self, "inner_optimizer"):
            _join_slots(self)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        given = private.trained_by(self) if trainable_variables is None else trainable_variables
        variables = expanded(given)
        if not len(grads):
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
        return super()._use_weight_decay(variable.whole.value if isinstance(variable, Part) else variable)

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
            with tf.device(average.value.device):
                later = tf.cast(tf.not_equal(self.iterations, 0), average.dtype)  # the first value is taken as it is
                kept = later * tf.cast(self.ema_momentum, average.dtype)
                average.assign(kept * average.value + (1 - kept) * variable.value)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        super()._overwrite_model_variables_with_average_value(expanded(trainable_variables))

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


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError where an optimizer's update of a part is not the part of its update."""
    if hasattr(optimizer, "inner_optimizer") or is_elementwise(optimizer):
        return
    raise ValueError(
        f"layers are held in parts on several devices, but {type(optimizer).__name__} may look at a whole weight. "
        f"Those that update each element by itself can be used: {', '.join(ELEMENTWISE)}."
    )


def adopt(model: Any, optimizer: Any) -> None:
    """Lets an optimizer update the parts of a model's weights, and cuts the slots that it has.

    Raises:
      ValueError: it is one that must see whole weights.
    """
    if has(optimizer, PartedOptimizer) or not any(is_whole(v) for v in model.variables):
        return
    check_optimizer(optimizer)
    if optimizer.built:
        trained = private.trained_by(optimizer)
        if not hasattr(optimizer, "inner_optimizer"):
            _cut_slots(optimizer, trained)
        private.train_on(optimizer, expanded(trained))
    swap(optimizer, PartedOptimizer)


def joined(variable: Any, parts: Parts, path: str) -> Any:
    """Makes a Keras variable one that is kept in parts."""
    swap(variable, Whole)
    private.become(variable, parts, path)
    return variable


def _cut_slots(optimizer: Any, trained: list[Any]) -> None:
    """The optimizer's variables stay the same objects; its lists get their parts."""
    rows = Slots(optimizer, len(trained)).rows
    for name in dict.fromkeys(name for row in rows for name in row):
        each = [_parts_of_slot(row.get(name), variable) for variable, row in zip(trained, rows, strict=True)]
        vars(optimizer)[name] = list(itertools.chain.from_iterable(each))


def _parts_of_slot(slot: Any, variable: Any) -> list[Any]:
    parts = parts_of(variable)
    if slot is None or not is_whole(variable):
        return [slot] * len(parts)
    axis, value, found = variable.value.axis, slot.value, []
    for piece in cut(value, [part.value.device for part in parts], axis):
        found.append(keras.Variable(piece, dtype=slot.dtype, trainable=False, name=slot.name))
        private.become(found[-1], piece, slot.path)
    joined(slot, Parts(found, axis, value), slot.path)
    return found


def _join_slots(optimizer: Any) -> None:
    """Puts one variable for all parts of a slot where the first of them stands in the optimizer's list."""
    trained = private.trained_by(optimizer)
    pieces: dict[tuple[str, int], list[Any]] = {}
    for variable, row in zip(trained, Slots(optimizer, len(trained)).rows, strict=True):
        for name, slot in row.items():
            if isinstance(variable, Part):
                pieces.setdefault((name, id(variable.whole)), []).append((slot, variable.whole.value.axis))
    instead: dict[int, Any] = {}
    for found in pieces.values():
        first, axis = found[0]
        instead.update((id(slot), None) for slot, _ in found)
        with tf.init_scope():
            whole = keras.Variable(0, dtype=first.dtype, trainable=False, name=first.name)
        instead[id(first)] = joined(whole, Parts([slot for slot, _ in found], axis, first.value), first.path)
    listed = [instead.get(id(v), v) for v in optimizer.variables]
    private.list_variables(optimizer, [v for v in listed if v is not None])
