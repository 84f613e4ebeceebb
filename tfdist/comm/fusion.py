"""Packs tensors into one flat tensor and takes them out again. Never communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm.buckets import ALIGNMENT


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor or `tf.Variable`; 0 where its shape is not known before it is run."""
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins tensors of one element type and static shapes into a vector, in order, each at a multiple of 64 bytes.

    One tensor is only reshaped, not copied.
    """
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    parts = []
    for tensor in tensors:
        parts.append(tf.reshape(tensor, [-1]))
        if gap := _gap(tensor.shape.num_elements(), tensor.dtype):
            parts.append(tf.zeros([gap], tensor.dtype))
    return tf.concat(parts, axis=0)


def unpack(flat: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """The tensors of static `shapes` that `pack` joined. Only those with a gap after them are copied."""
    shapes = [tuple(s) for s in shapes]
    if len(shapes) == 1:
        return [tf.reshape(flat, shapes[0])]
    sizes = [int(tf.TensorShape(s).num_elements()) for s in shapes]
    gaps = [_gap(size, flat.dtype) for size in sizes]
    # All parts must begin and end at the boundary, or TensorFlow's split copies every one of them.
    parts = tf.split(flat, [size + gap for size, gap in zip(sizes, gaps, strict=True)])
    exact = (part[:size] if gap else part for part, size, gap in zip(parts, sizes, gaps, strict=True))
    return [tf.reshape(part, shape) for part, shape in zip(exact, shapes, strict=True)]


def _gap(size: int, dtype: tf.DType) -> int:
    """Elements between a tensor of `size` elements and the next."""
    return -size % (ALIGNMENT // dtype.size)
