"""Plain Keras: `compile` and `fit` in one process, no strategy."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

from benchmarks import models

# Two inter-op threads even on one core: with one, ready operations run in no useful order (benchmarks/README.md).
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


class StepTimes(keras.callbacks.Callback):
    """Seconds from the end of a step to the end of the next, so that nothing between the steps is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class KerasFit:
    ranks = 1

    def build(self, model: str) -> keras.Model:
        return models.build(model)

    def prepare(self, model: str, steps: int) -> dict[str, Any]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        self.model = self.build(model)
        self.model.compile(keras.optimizers.SGD(models.RATE), loss(), jit_compile=False)
        self.batch = models.BATCH * self.ranks
        self.arrays = models.arrays(model, self.batch * steps)
        warm = 5 * self.batch
        self.fit(*(a[:warm] for a in self.arrays))
        shapes = [tuple(v.shape) for v in self.model.trainable_variables]
        return {"tensors": len(shapes), "gradient_bytes": 4 * self.model.count_params()}

    def fit(self, x: Any, y: Any) -> list[float]:
        times = StepTimes()
        self.model.fit(x, y, batch_size=self.batch, verbose=0, callbacks=[times])
        return times.seconds()

    def run(self) -> list[float]:
        return self.fit(*self.arrays)


def open() -> KerasFit:
    return KerasFit()
