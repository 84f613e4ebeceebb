"""`Share`: what a pipeline hands to a rank's step, and how a global batch becomes one."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.data.shares import bounds


class Share(NamedTuple):
    """One rank's part of one global batch.

    Attributes:
        data: what the user's pipeline yields, rows of this rank only.
        count: int32 scalar, samples of this rank that count (0 for a ghost).
        total: int32 scalar, samples of the global batch.
        ghost: bool scalar, whether `data` is a stand-in; `()` where that cannot happen.
        label: float32 scalar in [0, 1), fingerprint of the global batch's targets, by which ranks notice
            that they cut different batches; `()` where it is not needed.
    """

    data: Any
    count: Any
    total: Any
    ghost: Any = ()
    label: Any = ()


def rows(data: Any) -> tf.Tensor:
    """Number of rows (int32 scalar) of a batch: the first dimension of its first tensor."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf)[0]
    raise ValueError(
        "A batch without any tensor that has rows cannot be shared among ranks; expected tensors of shape "
        f"(batch, ...), received {data!r}."
    )


def cut_rows(data: Any, low: Any, high: Any) -> Any:
    """Rows `[low, high)` of every tensor of a batch; optionals and scalars pass through."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            start = tf.concat([[tf.cast(low, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], 0)
            size = tf.concat([[tf.cast(high - low, tf.int64)], leaf.dense_shape[1:]], 0)
            return tf.sparse.slice(leaf, start, size)
        if isinstance(leaf, tf.RaggedTensor):
            return leaf[low:high]
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            return leaf
        return leaf[low:high]

    return tf.nest.map_structure(one, data)


def with_ghost(low: Any, high: Any, total: Any) -> tuple[Any, Any]:
    """The bounds of a share of `total` rows; of one row where it is empty."""
    start = tf.minimum(low, total - 1)
    return start, tf.maximum(high, start + 1)


def cut(data: Any, rank: int, size: int, label: bool = False) -> Share:
    """This rank's share of the global batch `data`, with a ghost row where the share is empty."""
    total = rows(data)
    low, high = bounds(total, rank, size)
    share = cut_rows(data, *with_ghost(low, high, total))
    mark = fingerprint(data) if label else ()
    return Share(share, high - low, total, tf.equal(low, high), mark)


def fingerprint(data: Any) -> tf.Tensor:
    """A float32 scalar in [0, 1) that depends on the targets of a batch and on their order.

    Targets only: random augmentation may differ between the ranks' copies of an input without harm.
    """
    targets = data[1] if isinstance(data, (tuple, list)) and len(data) > 1 else data
    leaves = [t for t in tf.nest.flatten(targets) if isinstance(t, tf.Tensor) and t.shape.rank != 0]
    total = tf.zeros((), tf.int64)
    for leaf in leaves[:2]:
        flat = tf.reshape(leaf, [-1])
        if flat.dtype == tf.string:
            bits = tf.strings.to_hash_bucket_fast(flat, 1 << 20)
        elif flat.dtype.is_floating:
            bits = tf.cast(tf.bitcast(tf.cast(flat, tf.float32), tf.int32), tf.int64)
        else:
            bits = tf.cast(flat, tf.int64)
        # Multiplied and reduced twice, so that small labels in another order spread over the whole range too.
        place = tf.range(1, tf.size(flat, tf.int64) + 1, dtype=tf.int64) * 48271 % 2147483647
        total += tf.reduce_sum((bits % 1000003 + 7) * place % 1048573 * 40692 % 1048573)
    return tf.cast(total % 1048573, tf.float32) / 1048576.0
