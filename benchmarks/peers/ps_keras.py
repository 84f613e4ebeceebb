"""Plain Keras: `compile` and `fit` in one process, no cluster."""

from __future__ import annotations

import time
from typing import Any

import keras

from benchmarks import models
from benchmarks.pace import Mark
from benchmarks.peers.keras_fit import StepTimes
from benchmarks.peers.ps_fit import Arrays, PsFit


class PsKeras(PsFit):
    keras = keras

    def fit(self, arrays: Arrays, updates: int) -> list[Mark]:
        times = StepTimes()
        # StepTimes reads another clock than the marks.
        ahead = time.monotonic() - time.perf_counter()
        self.model.fit(*arrays, batch_size=models.BATCH, verbose=0, callbacks=[times])
        return [(end + ahead, done) for done, end in enumerate(times.ends, 1)]


def open() -> Any:
    return PsKeras()
