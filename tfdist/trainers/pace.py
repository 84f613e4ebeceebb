"""How long steps of a `fit` take, by the times at which they start. Costs two readings of the clock a call."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.planner.outlook import Measured

KEPT = 200  # calls, the last ones
UNSTEADY = 1  # calls of a train function that are left out, those that trace it


class Pace:
    """Of the last `fit` of a model: the times between starts of calls of its train function, within epochs.

    A start is the only moment that is the same on all devices: a device that computes on while Python goes ahead has a
    call return early, but the next ones do not start faster than steps are done.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=KEPT)  # seconds of a step
        self._executed = 1  # steps of a call
        self._start: float | None = None
        with tf.device("/CPU:0"):
            self._samples = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples")

    def begin(self) -> None:
        """A new `fit`."""
        self._gaps.clear()
        self._start = None
        self._samples.assign(0)

    def pause(self) -> None:
        """An epoch begins or ends: what is between it and the last step is no step."""
        self._start = None

    def saw(self, samples: Any) -> None:
        """Within a step: the length of its batch. The largest is kept, since an epoch's last batch may be short."""
        with tf.device("/CPU:0"):
            self._samples.assign(tf.maximum(self._samples, tf.cast(samples, tf.int64)))

    def watched(self, function: Callable[..., Any], steps: int) -> Callable[..., Any]:
        """A train function of so many steps a call that leaves its times here."""
        calls = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            now = time.perf_counter()
            if self._start is not None and calls > UNSTEADY:
                self._gaps.append((now - self._start) / steps)
                self._executed = steps
            self._start, calls = now, calls + 1
            return function(*args, **kwargs)

        return call

    @property
    def batch(self) -> int | None:
        """Samples of a batch; None before the first."""
        return int(self._samples.numpy()) or None

    def measured(self) -> Measured | None:
        """None before three calls in an epoch."""
        samples = self.batch
        if not self._gaps or samples is None:
            return None
        return Measured(statistics.median(self._gaps), samples, len(self._gaps) * self._executed)
