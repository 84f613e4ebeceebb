"""A model cut in two whose stages share one core: the work of micro-batches without a second process."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from benchmarks.peers.split_keras import SplitKeras


def cut(model: keras.Model, devices: int | None, batch: int, how: dict[str, Any]) -> tuple[keras.Model, int]:
    """The model over devices, and how many layers the first has."""
    tfdist.ModelParallelStrategy(devices, batch_size=batch, **how).distribute(model)
    found = [layer.kernel.value.device for layer in model.layers]
    return model, found.index(found[-1])


class SplitAlone(SplitKeras):
    def __init__(self) -> None:
        super().__init__()
        tfdist.ModelParallelStrategy(2)  # makes two logical CPUs

    def cut(self, model: keras.Model, batch: int, how: dict[str, Any]) -> tuple[keras.Model, int]:
        return cut(model, 2, batch, how)


def open() -> SplitAlone:
    return SplitAlone()
