"""Packs tensors into one flat tensor and takes them out again. Never communicates."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins tensors of one element type into a vector, in order. One tensor is only reshaped, not copied."""
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def unpack(flat: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """The tensors of static `shapes` that `pack` joined."""
    shapes = [tuple(s) for s in shapes]
    if len(shapes) == 1:
        return [tf.reshape(flat, shapes[0])]
    sizes = [int(tf.TensorShape(s).num_elements()) for s in shapes]
    return [tf.reshape(part, s) for part, s in zip(tf.split(flat, sizes), shapes, strict=True)]
