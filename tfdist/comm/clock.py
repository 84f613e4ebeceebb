"""When each bucket of a step was ready and when it was reduced.

backward pass  |------- g4 --- g3 ------- g2 --- g1 |
bucket 0                |~~~~~~~~~~~~~|             :
bucket 1                              :             |~~~~~~~~~~~~~~|
                        ready 0                     ready 1        done 1
busy = the two stretches together;  hidden = the part of them before the last bucket was ready
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Timing:
    """One step: seconds during which some bucket was under way, and the share of them before the last was ready."""

    busy_s: float
    hidden: float


def timing(ready: Sequence[float], done: Sequence[float]) -> Timing:
    """From the stamps, in seconds, of each bucket's start and end."""
    last = max(ready)
    busy = hidden = 0.0
    end = float("-inf")
    for start, stop in sorted(zip(ready, done, strict=True)):
        start = max(start, end)
        if stop > start:
            busy += stop - start
            hidden += max(0.0, min(stop, last) - start)
            end = stop
    return Timing(busy, hidden / busy if busy else 0.0)


class Clock:
    """Takes the stamps inside the step's graph and keeps those of the latest step in a variable."""

    def __init__(self) -> None:
        self._stamps: tf.Variable | None = None
        self._ready: list[Any] = []
        self._done: list[Any] = []

    def start(self, packed: Any) -> Any:
        """The packed bucket, handed on only when the moment it was ready has been noted."""
        return self._pass(packed, self._ready)

    def stop(self, reduced: Any) -> Any:
        """The reduced bucket, likewise."""
        return self._pass(reduced, self._done)

    def _pass(self, tensor: Any, stamps: list[Any]) -> Any:
        import tensorflow as tf

        # Not tf.timestamp: TensorFlow would run the stamps of a step one after the other, and with them the buckets.
        flat = tf.reshape(tensor, [-1])[:1]
        with tf.device("/CPU:0"):
            stamp = tf.numpy_function(lambda _: time.time(), [flat], tf.float64, stateful=False)
        stamp.set_shape([])
        stamps.append(stamp)
        with tf.control_dependencies([stamp]):
            return tf.identity(tensor)

    def finish(self) -> None:
        """Stores the step's stamps."""
        import tensorflow as tf

        stamps = tf.stack([*self._ready, *self._done])
        self._ready, self._done = [], []
        if self._stamps is None or self._stamps.shape != stamps.shape:
            with tf.init_scope():
                self._stamps = tf.Variable(tf.zeros(stamps.shape, tf.float64), trainable=False, name="tfdist_clock")
        self._stamps.assign(stamps)

    def read(self) -> tuple[list[float], list[float]] | None:
        """(ready, done) of the latest step, or None before the first."""
        if self._stamps is None:
            return None
        values = self._stamps.numpy().tolist()
        return values[: len(values) // 2], values[len(values) // 2 :]
