"""What the variants of the parameter server have in common: a first `fit`, and a longer one that is looked at."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks import models
from benchmarks.pace import Mark, Sampled, loopback_bytes, middle

Arrays = tuple[Any, Any]


class Setting(NamedTuple):
    """One measurement."""

    model: str
    workers: int = 0
    steps_per_execution: int = 1
    legacy: bool = False  # tf_keras' older optimizer of the same rule
    table: models.Table = models.Table()


class PsFit:
    """A variant: `prepare` once, then the `fit`s."""

    keras: Any  # the module: Keras 3 or tf_keras

    def prepare(self, setting: Setting) -> dict[str, Any]:
        """Starts the cluster, builds and compiles the model; {"pids": of its tasks}."""
        self.setting = setting
        tasks = self.start(setting.workers)
        self.keras.utils.set_random_seed(0)
        self.model = self.build()
        return {"pids": [task.pid for task in tasks.values()]}

    def start(self, workers: int) -> Mapping[str, subprocess.Popen[bytes]]:
        """The tasks beside this process, by name."""
        return {}

    def build(self) -> Any:
        """The compiled model."""
        model = models.build(self.setting.model, self.setting.table, self.keras)
        self.compile(model)
        return model

    def compile(self, model: Any) -> None:
        loss = self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizers = self.keras.optimizers.legacy if self.setting.legacy else self.keras.optimizers
        model.compile(optimizers.SGD(models.RATE), loss, steps_per_execution=self.setting.steps_per_execution)

    def fit(self, arrays: Arrays, updates: int) -> list[Mark]:
        """One epoch; updates as they were applied."""
        raise NotImplementedError

    def first(self, updates: int) -> float:
        """Seconds of the whole first `fit`, tracing and other set-up included."""
        arrays = self._arrays(updates)
        began = time.monotonic()
        self.fit(arrays, updates)
        return time.monotonic() - began

    def steady(self, updates: int) -> dict[str, float]:
        """Another `fit`: updates/s in its middle, and bytes an update on the loopback interface meanwhile."""
        arrays = self._arrays(updates)
        with Sampled(loopback_bytes) as wire:
            marks = self.fit(arrays, updates)
        (start, before), (end, after) = middle(marks)
        return {
            "updates_per_s": (after - before) / (end - start),
            "bytes_an_update": (wire.at(end) - wire.at(start)) / (after - before),
        }

    def _arrays(self, updates: int) -> Arrays:
        return models.arrays(self.setting.model, models.BATCH * updates, self.setting.table)


def pin_workers(tasks: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Each worker to one core; a ps is left alone, as is the chief.

    Call it when they serve: TensorFlow makes as many threads as it sees cores, and a worker with one thread waits for
    itself. What threads make from then on is pinned with them.
    """
    cores = sorted(os.sched_getaffinity(0))
    for name, task in tasks.items():
        job, _, index = name.partition("/")
        if job == "worker":
            for thread in os.listdir(f"/proc/{task.pid}/task"):
                os.sched_setaffinity(int(thread), {cores[int(index) % len(cores)]})
