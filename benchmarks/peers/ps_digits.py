"""Real digits, a small network and one kind of consistency: how soon it is good."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist
from benchmarks.peers.ps_fit import pin_workers

RATE, MOMENTUM = 0.01, 0.9
WARM = 3  # epochs, after which every worker has set up what it runs


class Task(NamedTuple):
    """One run."""

    kind: str  # a class of tfdist's, such as "Async", and its arguments
    arguments: dict[str, Any]
    workers: int
    batch: int  # samples of a worker's gradient
    epochs: int  # at most
    accuracy: float  # of the samples held back, at which it ends
    seed: int


class Until(keras.callbacks.Callback):
    """Notes (seconds, updates, accuracy) at the end of each epoch; ends `fit` at `accuracy`."""

    def __init__(self, accuracy: float) -> None:
        super().__init__()
        self.accuracy, self.history = accuracy, []

    def on_train_begin(self, logs: Any = None) -> None:
        self.began = time.monotonic()
        self.history = [(0.0, 0, None)]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        reached = logs["val_accuracy"]
        self.history.append((time.monotonic() - self.began, int(self.model.optimizer.iterations), reached))
        if reached >= self.accuracy:
            self.model.stop_training = True


class PsDigits:
    def prepare(self, *fields: Any) -> dict[str, Any]:
        """Starts the cluster, trains a little, so that everything is set up, and forgets what was learnt.

        Args:
            fields: of a `Task`.
        """
        self.task = task = Task(*fields)
        cluster = tfdist.LocalCluster(workers=task.workers, ps=1)
        consistency = getattr(tfdist, task.kind)(**task.arguments)
        strategy = tfdist.ParameterServerStrategy(cluster=cluster, consistency=consistency)
        pin_workers(cluster.processes)
        # A worker's share is the same in every kind. Where the shares of all make one update, its rate is scaled by
        # their number (Goyal et al. 2017).
        shares = strategy.num_replicas_in_sync
        self.batch = task.batch * shares
        images, labels = load_digits(return_X_y=True)
        split = train_test_split(
            (images / 16).astype("float32"), labels, test_size=0.2, random_state=1, stratify=labels
        )
        self.x, self.xv, self.y, self.yv = split
        keras.utils.set_random_seed(task.seed)
        hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
        self.model = strategy.distribute(keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)]))
        self.model.compile(
            keras.optimizers.SGD(RATE * shares, momentum=MOMENTUM),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        weights = self.model.get_weights()
        self.fit(WARM, [])
        self.model.set_weights(weights)
        optimizer = self.model.optimizer
        rate = float(optimizer.learning_rate)
        for variable in optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        optimizer.learning_rate = rate
        return {"pids": {name: process.pid for name, process in cluster.processes.items()}}

    def run(self) -> dict[str, Any]:
        """Trains to the accuracy; the history, and what RunReport says."""
        until, report = Until(self.task.accuracy), tfdist.RunReport()
        self.fit(self.task.epochs, [until, report])
        return {"history": until.history, "report": report.result}

    def fit(self, epochs: int, callbacks: list[keras.callbacks.Callback]) -> None:
        self.model.fit(
            self.x, self.y, batch_size=self.batch, epochs=epochs, validation_data=(self.xv, self.yv),
            verbose=0, callbacks=callbacks,
        )  # fmt: skip


def open() -> PsDigits:
    return PsDigits()
