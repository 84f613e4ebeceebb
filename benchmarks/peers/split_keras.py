"""Plain Keras on one core: what a model that is cut in two is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.peers.keras_fit import StepTimes  # which sets TensorFlow's threads

RATE = 0.01


class SplitKeras:
    """Several models that live side by side, each under a name."""

    def __init__(self) -> None:
        self._models: dict[str, keras.Model] = {}

    def prepare(self, name: str, widths: Sequence[int], how: dict[str, Any], batch: int) -> Any:
        """Builds Dense layers from `widths[0]` inputs on, and runs a few steps; where it was cut."""
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(width, activation="relu") for width in widths[1:]]
        model, cut = self.cut(keras.Sequential([keras.Input((widths[0],)), *layers]), batch, how)
        model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=False)
        self._models[name] = model
        self.run(name, widths, batch, 3)
        return cut

    def cut(self, model: keras.Model, batch: int, how: dict[str, Any]) -> tuple[keras.Model, Any]:
        return model, None

    def run(self, name: str, widths: Sequence[int], batch: int, steps: int) -> dict[str, Any]:
        """Trains for so many steps and one that is not timed.

        Returns:
          `seconds` of each step; `processor`, seconds of a step by process, start and end of `fit` included.
        """
        random = np.random.default_rng(0)
        shapes = ((batch * (steps + 1), width) for width in (widths[0], widths[-1]))
        x, y = (random.random(shape, dtype="float32") for shape in shapes)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        options = tf.data.Options()
        options.autotune.enabled = False
        times, before = StepTimes(), self.processor()
        self._models[name].fit(data.with_options(options), verbose=0, callbacks=[times])
        used = [(after - start) / (steps + 1) for start, after in zip(before, self.processor(), strict=True)]
        return {"seconds": times.seconds(), "processor": used}

    def processor(self) -> list[float]:
        """Seconds of processor time, by process."""
        own = os.times()
        return [own.user + own.system]


def open() -> SplitKeras:
    return SplitKeras()
