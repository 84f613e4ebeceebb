"""A checkpoint on disk from which a killed job goes on: at its epoch and step, with its optimizer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist import private
from tfdist.trainers.files import whole
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.ps_session import Session

WEIGHTS, STATE = "model.weights.h5", "state.json"
NAME = re.compile(r"(\.tfdist-\d+-)?\d{6}-\d{9}")
SHARE = 0.05  # of the time, at most, that checkpoints take


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints while `fit` runs on a parameter server, and goes on from the last one in a run after it.

    ```python
    model.fit(x, y, epochs=10, callbacks=[tfdist.Checkpoint("/shared/job-17")])
    ```

    A checkpoint holds the weights with the optimizer (a plain Keras file), epoch and step, and the metrics of the epoch
    so far. It is written beside the last one and takes its place by one rename, so a kill at any moment leaves a whole
    one. A run that finds one loads it, goes on with its epoch, and passes over the batches that epoch has trained on
    already: the same ones only where the order of the data is the same in every run (`shuffle=False`, or a dataset
    without a random order). When `fit` is done the checkpoints are removed, as by `keras.callbacks.BackupAndRestore`.

    Args:
      directory: of this job alone, on a file system that outlives the chief.
      seconds: between two checkpoints; more where they would take more than 5 % of the time.

    Raises:
      ValueError: the model is not one of a `ParameterServerStrategy`, or `seconds` is not positive.
    """

    def __init__(self, directory: str | os.PathLike[str], seconds: float = 60.0) -> None:
        super().__init__()
        if not seconds > 0:
            raise ValueError(f"Checkpoint: seconds is {seconds!r}, expected a number above 0.")
        self.directory, self.seconds = Path(directory), seconds
        self._epoch = self._step = 0
        self._metrics: list[Any] = []
        self._next = 0.0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if not isinstance(model.__dict__.get("_tfdist"), Session):
            raise ValueError(
                "tfdist.Checkpoint is for models of a ParameterServerStrategy: call "
                "`model = strategy.distribute(model)` before, or use keras.callbacks.BackupAndRestore."
            )

    def on_train_begin(self, logs: Any = None) -> None:
        self._next = time.monotonic() + self.seconds
        if (last := latest(self.directory)) is None:
            return
        state = json.loads((last / STATE).read_text())
        self.model.load_weights(last / WEIGHTS)
        private.set_initial_epoch(self.model, state["epoch"])
        self.model.__dict__["_tfdist"].skip = state["step"]
        self._metrics = state["metrics"]
        print(
            f"tfdist: going on from {last}: epoch {state['epoch'] + 1}, step {state['step']}, "
            f"update {int(self.model.optimizer.iterations)}",
            flush=True,
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._step = epoch, 0
        for variable, value in zip(metric_variables(self.model), self._metrics, strict=False):
            variable.assign(np.asarray(value, variable.dtype))
        self._metrics = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step = batch + 1
        if time.monotonic() > self._next and not self.model.__dict__["_tfdist"].skip:
            self.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._step = epoch + 1, 0
        if time.monotonic() > self._next:
            self.save()

    def on_train_end(self, logs: Any = None) -> None:
        for mine in found(self.directory):
            shutil.rmtree(mine, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or the user keeps something else in it
            self.directory.rmdir()

    def save(self) -> None:
        """Writes a checkpoint now."""
        began = time.monotonic()
        final = self.directory / f"{self._epoch:06d}-{self._step:09d}"
        with whole(final, "save checkpoint") as partial:
            part = Path(partial)
            shutil.rmtree(part, ignore_errors=True)  # of a process of this number that was killed
            part.mkdir(parents=True)
            self.model.save_weights(part / WEIGHTS)
            metrics = [v.numpy().tolist() for v in metric_variables(self.model)] if self._step else []
            (part / STATE).write_text(json.dumps({"epoch": self._epoch, "step": self._step, "metrics": metrics}))
            for name in (WEIGHTS, STATE):
                with open(part / name, "rb+") as file:
                    os.fsync(file.fileno())
        for older in found(self.directory):
            if older != final:
                shutil.rmtree(older, ignore_errors=True)
        ended = time.monotonic()
        self._next = ended + max(self.seconds, (ended - began) / SHARE)


def found(directory: Path) -> list[Path]:
    """The checkpoints in a directory, and what kills have left of some."""
    return [p for p in directory.iterdir() if NAME.fullmatch(p.name)] if directory.is_dir() else []


def latest(directory: Path) -> Path | None:
    """The last whole checkpoint in a directory, or None."""
    ready = [p for p in found(directory) if not p.name.startswith(".") and (p / STATE).is_file()]
    return max(ready, key=lambda p: p.name, default=None)
