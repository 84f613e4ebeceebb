"""Sums gradients of which only some rows exist (embeddings) over ranks: only those rows travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.comm.collective import Collective


def on_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """`change` done to a gradient, or to the rows there are of it."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def deduplicate(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once, repeated rows summed."""
    unique, position = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(unique))
    return tf.IndexedSlices(values, unique, slices.dense_shape)


def all_reduce(collective: Collective, slices: tf.IndexedSlices, name: str) -> tuple[tf.IndexedSlices, tf.Tensor]:
    """The sum over ranks, each touched row once and in the same order on every rank, and the bytes this rank sent.

    Each rank sends the rows it touched (indices and values), deduplicated. 16-bit floats travel and are
    summed as float32. The byte count is an int64 scalar.
    """
    dtype = slices.values.dtype
    wide = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    mine = deduplicate(tf.IndexedSlices(tf.cast(slices.values, wide), slices.indices, slices.dense_shape))
    indices = collective.all_gather(mine.indices, f"{name}.rows")
    values = collective.all_gather(mine.values, f"{name}.values")
    values = tf.ensure_shape(values, [None, *slices.values.shape[1:]])
    total = deduplicate(tf.IndexedSlices(values, indices, slices.dense_shape))
    result = tf.IndexedSlices(tf.cast(total.values, dtype), total.indices, slices.dense_shape)
    sent = tf.size(mine.indices, tf.int64) * mine.indices.dtype.size
    return result, sent + tf.size(mine.values, tf.int64) * wide.size
