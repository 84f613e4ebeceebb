"""Where workers leave what they computed until the chief says what counts: a queue on each ps.

A queue takes tensors of any length, so rows of embeddings too, and keeps what it was sent without a copy. A deposit
carries the number of its call: one that was made twice (its worker died, the call was run again) counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.comm import sparse

ROOM = 1 << 20  # deposits; there are never more than calls under way


@dataclass(frozen=True)
class Like:
    """What one tensor of a deposit is: `rows` of a table of this shape, or all of it."""

    shape: tf.TensorShape
    dtype: tf.DType
    rows: bool = False

    @property
    def columns(self) -> list[tuple[tf.TensorShape, tf.DType]]:
        """Of the tensors that travel."""
        if self.rows:
            return [(tf.TensorShape([None]), tf.int64), (tf.TensorShape([None, *self.shape[1:]]), self.dtype)]
        return [(tf.TensorShape(self.shape), tf.as_dtype(self.dtype))]


class Deposits:
    """The queue of one ps.

    Args:
      device: of the ps task's CPU.
      likes: what one deposit holds.
      name: unique in the job.
    """

    def __init__(self, device: str, likes: Sequence[Like], name: str) -> None:
        self._device, self._likes = device, list(likes)
        self._columns = [column for like in likes for column in like.columns]
        with tf.device(device):
            self._queue = tf.queue.FIFOQueue(ROOM, [tf.int64, *(dtype for _, dtype in self._columns)], shared_name=name)

    def put(self, call: tf.Tensor, tensors: Sequence[Any]) -> tf.Operation:
        """In a worker's graph: one deposit; `tf.IndexedSlices` where rows were announced."""
        flat = [call]
        for like, tensor in zip(self._likes, tensors, strict=True):
            flat += [tf.cast(tensor.indices, tf.int64), tensor.values] if like.rows else [tensor]
        with tf.device(self._device):
            return self._queue.enqueue(flat)

    def weighted(self, calls: tf.Tensor, weights: tf.Tensor) -> list[Any]:
        """In a graph: empties the queue; the sum of the deposits of `calls`, each times its weight.

        Args:
          calls: int64, (m,).
          weights: float32, (m,); of whole numbers (counters) the largest is taken instead.
        """
        shapes = [shape for shape, _ in self._columns]

        def more(left: tf.Tensor, *_: Any) -> tf.Tensor:
            return left > 0

        def take(left: tf.Tensor, used: tf.Tensor, *sums: tf.Tensor) -> Any:
            with tf.device(self._device):
                call, *found = self._queue.dequeue()
                call.set_shape([])
                for tensor, shape in zip(found, shapes, strict=True):
                    tensor.set_shape(shape)
                fits = tf.logical_and(tf.equal(calls, call), tf.logical_not(used))
                weight = tf.reduce_sum(tf.where(fits, weights, tf.zeros_like(weights)))
                sums = tf.cond(
                    tf.reduce_any(fits), lambda: self._added(sums, found, weight), lambda: [*map(tf.identity, sums)]
                )
                return left - 1, tf.logical_or(used, fits), *sums

        with tf.device(self._device):
            nothing = [tf.zeros([0 if size is None else size for size in s], dtype) for s, dtype in self._columns]
            _, _, *sums = tf.while_loop(
                more,
                take,
                [self._queue.size(), tf.zeros_like(calls, tf.bool), *nothing],
                shape_invariants=[tf.TensorShape([]), tf.TensorShape([None]), *shapes],
                parallel_iterations=1,
            )
            return self._joined(sums)

    def _added(self, sums: Sequence[tf.Tensor], found: Sequence[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        have, new, result = iter(sums), iter(found), []
        for like in self._likes:
            if like.rows:
                result.append(tf.concat([next(have), next(new)], 0))
                values = next(new)
                result.append(tf.concat([next(have), values * tf.cast(weight, values.dtype)], 0))
            elif tf.as_dtype(like.dtype).is_floating:
                result.append(next(have) + next(new) * tf.cast(weight, like.dtype))
            else:
                result.append(tf.maximum(next(have), next(new)))
        return result

    def _joined(self, sums: Sequence[tf.Tensor]) -> list[Any]:
        rest, result = iter(sums), []
        for like in self._likes:
            if like.rows:
                indices, values = next(rest), next(rest)
                slices = tf.IndexedSlices(values, indices, tf.constant(list(like.shape), tf.int64))
                result.append(sparse.deduplicate(slices))
            else:
                result.append(next(rest))
        return result
