"""tfdist as its users write it: `ParameterServerStrategy` on a `LocalCluster`, `distribute`, `fit`, all defaults."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import keras

import tfdist
from benchmarks import models
from benchmarks.pace import Mark
from benchmarks.peers.ps_fit import Arrays, PsFit, pin_workers


class PsTfdist(PsFit):
    keras = keras

    def start(self, workers: int) -> Mapping[str, subprocess.Popen[bytes]]:
        cluster = tfdist.LocalCluster(workers=workers, ps=1)
        self.strategy = tfdist.ParameterServerStrategy(cluster=cluster)  # returns when all tasks serve
        pin_workers(cluster.processes)
        return cluster.processes

    def build(self) -> Any:
        with self.strategy.scope():
            return self.strategy.distribute(super().build())

    def fit(self, arrays: Arrays, updates: int) -> list[Mark]:
        self.model.fit(*arrays, batch_size=models.BATCH, verbose=0)
        # What RunReport's updates/s are made from, but without the first fifth.
        return [(moment, done) for moment, done, _ in self.model.__dict__["_tfdist"]._marks]


def open() -> Any:
    return PsTfdist()
