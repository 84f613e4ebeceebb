"""Layers that are held in parts on several devices: a Dense or EinsumDense by columns, an Embedding by rows.

Everything but the product, or the looking up, is Keras' own: types, masks, activation, what the layer saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist.split.parts import is_whole, parts_of, placed


@dataclass(frozen=True)
class Columns:
    """How a layer's product falls into parts.

    Attributes:
      product: of input and kernel.
      kernel, output: the axis along which they are cut, and joined.
      bias: likewise; None where all parts need the same bias, which then stays whole.
    """

    product: Callable[[Any, Any], Any]
    kernel: int
    output: int
    bias: int | None


class Held:
    """Mixed into a layer that is held in parts."""

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"layer {self.name!r} is held in parts on several devices, and {what} of such a layer is not possible. "
            "Map it to one device in balance=, or save the model and load it without a strategy."
        )

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("LoRA")


class ByColumns(Held):
    """Mixed into Dense and EinsumDense: each part computes its own columns of the output."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        if not isinstance(inputs, tf.Tensor):
            self._refuse(f"an input of type {type(inputs).__name__}")
        columns = columns_of(self)

        def product(x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
            y = columns.product(x, tf.cast(kernel, self.compute_dtype))
            return keras.ops.add(y, tf.cast(bias[0], self.compute_dtype)) if bias else y

        cut_bias = self.bias is not None and is_whole(self.bias)
        weights = [parts_of(self.kernel), *([parts_of(self.bias)] if cut_bias else [])]
        outputs = []
        for mine in zip(*weights, strict=True):
            device = mine[0].value.device
            with tf.device(device):
                tensors = [tf.convert_to_tensor(weight.value) for weight in mine]
            outputs.append(placed(device, product, inputs, *tensors))
        x = tf.concat(outputs, columns.output)
        if self.bias is not None and not cut_bias:
            x = keras.ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class ByRows(Held):
    """Mixed into Embedding: each part looks up the rows that it has, and only those come and go."""

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, tf.Tensor):
            self._refuse(f"an input of type {type(inputs).__name__}")
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        ids = tf.reshape(tf.where(ids < 0, ids + self.input_dim, ids), [-1])  # -1 is the last row, as in Keras
        parts = parts_of(self.embeddings)
        places, rows, start = [], [], 0
        for part in parts:
            end = start + part.shape[0]
            # What is out of range goes to the first or the last, which says so as any look-up does.
            mine = tf.constant(True) if part is parts[0] else ids >= start
            mine = tf.logical_and(mine, tf.ones_like(ids, tf.bool) if part is parts[-1] else ids < end)
            where = tf.cast(tf.where(mine)[:, 0], tf.int32)
            wanted = tf.gather(ids, where) - start
            with tf.device(part.value.device):
                rows.append(tf.gather(part.value, wanted))
            places.append(where)
            start = end
        together = tf.dynamic_stitch(places, rows)
        shape = tf.concat([tf.shape(inputs), [self.output_dim]], 0)
        found = tf.ensure_shape(tf.reshape(together, shape), [*inputs.shape, self.output_dim])
        return tf.cast(found, self.compute_dtype)


def columns_of(layer: Any) -> Columns:
    """How the columns of a Dense or EinsumDense are cut.

    Raises:
      ValueError: an EinsumDense has none.
    """
    if layer.__class__ is keras.layers.Dense:
        return Columns(keras.ops.matmul, 1, -1, 0)
    taken, out = layer.equation.replace(" ", "").split("->")
    taken, kernel = taken.split(",")
    found = [c for c in out if c in kernel and c not in taken]
    if not found:
        raise ValueError(
            f"layer {layer.name!r} computes {layer.equation!r}, which leaves no axis of its kernel in the output that "
            "the input does not have: it cannot be held by columns. Map it to one device in balance=."
        )
    label, letters = found[0], out.replace("...", "")
    after = "..." in out.partition(label)[2]
    at = out.index(label) if after or "..." not in out else letters.index(label) - len(letters)
    bias = None
    if layer.bias_axes and label in layer.bias_axes:
        # Keras' bias has the output's axes from the first one on that it is for.
        bias = letters.index(label) - min(letters.index(c) for c in layer.bias_axes)
    return Columns(lambda x, k: keras.ops.einsum(layer.equation, x, k), kernel.index(label), at, bias)
