"""All-reduces of one tensor and nothing else, through tfdist's collective."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from tfdist.comm import collective


class RingAlone:
    def __init__(self) -> None:
        self.comm = collective.get()

    def prepare(self, size: str, repeats: int) -> dict[str, Any]:
        self.tensor, self.repeats = tf.ones([int(size) // 4]), repeats
        self.reduce = tf.function(lambda t: self.comm.all_reduce(t, f"benchmark.{size}"))
        self.reduce(self.tensor)
        return {}

    def run(self) -> list[float]:
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            self.reduce(self.tensor)
            seconds.append(time.perf_counter() - start)
        return seconds


def open() -> RingAlone:
    return RingAlone()
