"""A checkpoint on disk: a directory `<epoch>-<step>` that appears whole, by one rename.

    model.weights.h5   weights and optimizer, a file of Keras' own
    state.npz          what that leaves out: seeds of layers, metrics so far, Python's and numpy's random states
    state.json         where in the training that was
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.trainers.files import whole

WEIGHTS, ARRAYS, STATE = "model.weights.h5", "state.npz", "state.json"
NAME = re.compile(r"(\.tfdist-\d+-)?\d{6}-\d{9}")


@dataclass(frozen=True)
class Progress:
    """Where in a training a checkpoint is.

    Attributes:
      epoch, step: whole epochs, and batches of the next one, that were trained on.
      first: the epoch with which the training began.
      seed: TensorFlow's global one, from which the order of arrays comes.
      done: training had been told to stop, so only what comes after `fit` is left.
      data: what was trained on, in words; compared where a step is gone on from.
      job: the elastic job in which the training has ended, "" while it goes on.
    """

    epoch: int
    step: int
    first: int
    seed: int | None
    done: bool
    data: str
    job: str = ""

    @property
    def name(self) -> str:
        return f"{self.epoch:06d}-{self.step:09d}"


def found(directory: Path) -> list[Path]:
    """The checkpoints in a directory, and what kills have left of some."""
    return [p for p in directory.iterdir() if NAME.fullmatch(p.name)] if directory.is_dir() else []


def latest(directory: Path) -> Path | None:
    """The last whole checkpoint in a directory, or None."""
    ready = [p for p in found(directory) if not p.name.startswith(".") and (p / STATE).is_file()]
    return max(ready, key=lambda p: p.name, default=None)


def progress(checkpoint: Path) -> Progress:
    """Where in the training a checkpoint is."""
    return Progress(**json.loads((checkpoint / STATE).read_text()))


def write(directory: Path, at: Progress, model: Any, arrays: Callable[[], dict[str, np.ndarray]]) -> Path:
    """Writes a checkpoint, then removes those before it; its path.

    `arrays` is called when the weights are written, which brings what tasks of a parameter server hold.
    """
    final = directory / at.name
    with whole(final, "save checkpoint") as partial:
        part = Path(partial)
        shutil.rmtree(part, ignore_errors=True)  # of a process of this number that was killed
        part.mkdir(parents=True)
        model.save_weights(part / WEIGHTS)
        np.savez(part / ARRAYS, **arrays())
        (part / STATE).write_text(json.dumps(asdict(at)))
        for name in (WEIGHTS, ARRAYS, STATE):
            with open(part / name, "rb+") as file:
                os.fsync(file.fileno())
    for older in found(directory):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)
    return final


def named(kind: str, values: list[Any]) -> dict[str, np.ndarray]:
    """Values as entries of the file of arrays: "seed.0", "seed.1", ..."""
    return {f"{kind}.{i}": np.asarray(v) for i, v in enumerate(values)}


def values_of(arrays: dict[str, np.ndarray], kind: str) -> list[np.ndarray]:
    """The opposite of `named`."""
    count = sum(name.startswith(f"{kind}.") for name in arrays)
    return [arrays[f"{kind}.{i}"] for i in range(count)]


def random_states() -> dict[str, np.ndarray]:
    """Python's and numpy's global generators, from which PyDatasets are shuffled and generators draw."""
    _, numbers, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": np.array(numbers, np.uint64),
        "python.gauss": np.array(np.nan if gauss is None else gauss),
        "numpy": np.array([*keys, place, has_gauss], np.uint64),
        "numpy.gauss": np.array(cached),
    }


def set_random_states(arrays: dict[str, np.ndarray]) -> None:
    """The opposite of `random_states`."""
    version = random.getstate()[0]
    gauss = float(arrays["python.gauss"])
    numbers = tuple(int(n) for n in arrays["python"])
    random.setstate((version, numbers, None if np.isnan(gauss) else gauss))
    *keys, place, has_gauss = (int(n) for n in arrays["numpy"])
    state = (np.random.get_state()[0], np.array(keys, np.uint32), place, has_gauss, float(arrays["numpy.gauss"]))
    np.random.set_state(state)
