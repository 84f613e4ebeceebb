"""Weights on their way from the chief to an evaluator: asked for, cut into pieces, put together again.

::

    evaluator   asks: 71 ---              evaluates, now and then "alive"    asks: 72 ---
                            |            ^                                               |
    chief                    epoch's end, pieces of 71: (updates, ..., last)              epoch's end, ...

Both queues are on the chief's own TensorFlow server, as those of `tasks.board` are. The chief sends only what was asked
for: without an evaluator it sends nothing, and one that is slow gets later weights. TF_CONFIG need not name the
evaluator; Kubeflow's does not. Each queue has one reader, who never waits in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tasks.board import Board
from tfdist.tf_config import Cluster

PIECE = 1 << 24  # bytes of a message: far below gRPC's 2 GB, and through a slow link within `Board`'s time-out
ALIVE, NOTHING = 0, -1  # in the place of a request: nothing as yet, nothing ever
WHO = 20  # bits of a request's number that count an evaluator's requests; those above are the evaluator's own


@dataclass(frozen=True)
class Header:
    """What a piece is of.

    Attributes:
      number: with which the weights were asked for.
      updates: that the optimizer has made.
      layout: of all weights, see `layout`.
      start: of the piece, in bytes.
      total: bytes of all pieces; 0 where there are no new weights.
      last: 1 where no others will follow.
    """

    number: int
    updates: int
    layout: int
    start: int
    total: int
    last: int


def layout(arrays: Sequence[np.ndarray]) -> int:
    """The same for arrays of the same shapes and types, in the same order."""
    return zlib.crc32(repr([(a.shape, str(a.dtype)) for a in arrays]).encode())


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The arrays' bytes in a row; uint8 [bytes]."""
    parts = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def cut(data: np.ndarray, size: int = PIECE) -> Iterator[tuple[int, np.ndarray]]:
    """(start, piece) of at most `size` bytes; one empty piece where there is nothing."""
    for start in range(0, max(len(data), 1), size):
        yield start, data[start : start + size]


def shaped(data: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The opposite of `flat`, of the shapes and types of `like`."""
    found, start = [], 0
    for array in like:
        found.append(data[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return found


class Collected:
    """Pieces of the weights that were asked for by `number`, as they come."""

    def __init__(self, number: int) -> None:
        self._number, self._pieces, self._bytes = number, [], 0  # type: ignore[var-annotated]

    def add(self, header: Header, piece: np.ndarray) -> np.ndarray | None:
        """All bytes once they are there; pieces asked for by others, or left of an earlier try, count for nothing."""
        if header.number != self._number:
            return None
        if header.start == 0:
            self._pieces, self._bytes = [], 0
        if header.start != self._bytes:
            return None
        self._pieces.append(piece)
        self._bytes += len(piece)
        return np.concatenate(self._pieces) if self._bytes == header.total else None


ASKED = {"shared_name": "tfdist_asked", "capacity": 1000, "shapes": [()]}
WEIGHTS = {"shared_name": "tfdist_weights", "capacity": -1, "shapes": []}  # without limit; pieces of any length


class Queues:
    """The queues, on the chief, where its TensorFlow server finds them under their names.

    No session of the chief's own: one that is there while a worker comes back ends the process when it is closed.
    """

    def __init__(self) -> None:
        with tf.device("/job:chief/replica:0/task:0/device:CPU:0"):
            self._asked = tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], **ASKED)
            self._weights = tf.raw_ops.FIFOQueueV2(component_types=[tf.int64, tf.uint8], **WEIGHTS)

    def asked(self) -> list[int]:
        """What was asked since the last time."""
        size = tf.raw_ops.QueueSizeV2(handle=self._asked)
        (numbers,) = tf.raw_ops.QueueDequeueManyV2(handle=self._asked, n=size, component_types=[tf.int64])
        return [int(n) for n in numbers]

    def send(self, header: Header, piece: np.ndarray) -> None:
        """A piece of what was asked for."""
        components = [tf.constant(astuple(header), tf.int64), tf.constant(piece)]
        tf.raw_ops.QueueEnqueueV2(handle=self._weights, components=components)


class Exchange(Board):
    """The chief's queues, those of weights too, as seen from the evaluator."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        v1 = tf.compat.v1
        with self.placed():
            asked = v1.FIFOQueue(dtypes=[tf.int64], **ASKED)
            weights = v1.FIFOQueue(dtypes=[tf.int64, tf.uint8], **{**WEIGHTS, "shapes": None})
            self._sizes |= {"asked": asked.size(), "weights": weights.size()}
            self._number = v1.placeholder(tf.int64, ())
            self._ask = asked.enqueue(self._number)
            self._receive = weights.dequeue()

    def ask(self, number: int) -> None:
        """Asks for the weights of the next epoch's end.

        `ALIVE` and `NOTHING` ask for none; -n says that the weights of request n, the last, are evaluated.
        """
        self._run(self._ask, {self._number: number})

    def receive(self) -> tuple[Header, np.ndarray]:
        """A piece, where `sizes` says that there is one."""
        header, piece = self._run(self._receive)
        return Header(*(int(n) for n in header)), piece


def values(model: Any) -> list[np.ndarray]:
    """The model's weights, those of BatchNormalization's statistics too; no metrics, no random states."""
    return [variable.numpy() for variable in model.weights]
