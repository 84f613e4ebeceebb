"""Updates a second, and bytes on the loopback interface, over the middle of a `fit`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Mark = tuple[float, float]  # (time.monotonic(), what had been counted by then)
MIDDLE = 0.8  # of the updates of a `fit`; its start sets things up, at its end workers run out of work


def middle(marks: Sequence[Mark], share: float = MIDDLE) -> tuple[Mark, Mark]:
    """The first and the last mark within the middle `share` of the updates.

    Raises:
        ValueError: there are less than two.
    """
    edge = (1 - share) / 2 * marks[-1][1] if marks else 0.0
    inside = [mark for mark in marks if edge <= mark[1] <= marks[-1][1] - edge]
    if len(inside) < 2:
        raise ValueError(f"{len(inside)} of {len(marks)} marks are in the middle {share:.0%}; train for more updates.")
    return inside[0], inside[-1]


class Sampled:
    """A context manager: what `read` gives, looked at every `seconds` by a thread.

    Attributes:
        marks: one a look, the last one when the block ends.
    """

    def __init__(self, read: Callable[[], float], seconds: float = 0.05) -> None:
        self.marks: list[Mark] = []
        self._read, self._seconds = read, seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def at(self, moment: float) -> float:
        """The value at a time of `time.monotonic()`, interpolated."""
        times, values = zip(*self.marks, strict=True)
        return float(np.interp(moment, times, values))

    def __enter__(self) -> Sampled:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._over.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        value = self._read()
        self.marks.append((time.monotonic(), float(value)))


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried, of all programs (Linux)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("/proc/net/dev has no loopback interface `lo`, so bytes cannot be counted.")
