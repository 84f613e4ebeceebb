"""tfdist as its users write it: `RingAllReduceStrategy`, `distribute`, `fit`, all defaults."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from benchmarks import models
from benchmarks.peers.keras_fit import KerasFit


class TfdistFit(KerasFit):
    def __init__(self) -> None:
        self.strategy = tfdist.RingAllReduceStrategy()
        self.ranks = self.strategy.num_replicas_in_sync

    def build(self, model: str) -> keras.Model:
        with self.strategy.scope():
            return self.strategy.distribute(models.build(model))

    def prepare(self, model: str, steps: int) -> dict[str, Any]:
        facts = super().prepare(model, steps)
        reducers = self.model.__dict__["_tfdist"].reducers
        facts["buckets"] = [
            bucket.nbytes for reducer in reducers for t in reducer.traffic.values() for bucket in t.buckets
        ]
        return facts


def open() -> TfdistFit:
    return TfdistFit()
