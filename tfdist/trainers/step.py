"""The step that is being traced (or run eagerly) on this rank: who it is, how much it counts."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.comm import sparse
from tfdist.comm.collective import Collective
from tfdist.data.share import Share, rows

_here = threading.local()


def current() -> Step | None:
    """The step that surrounds the caller, or None outside of a distributed model's step."""
    return getattr(_here, "step", None)


@dataclass
class Step:
    """One rank's part in one update or evaluation.

    Attributes:
        key: prefix of every operation's name; the same on every rank.
        reduce_op: "mean" (the joined batch), "sum" or "adasum".
        count, total: samples of this rank and of all ranks, int32 scalars.
        ghost: bool scalar, or None where every rank has a sample.
        label: fingerprint of the global batch, or None.
        uneven: whether the ranks may have different numbers of samples.
        weighted: optimizers whose loss was already weighted, by `id`.
        reduced: optimizers whose gradients were already summed, by `id`.
        applied: whether any optimizer was applied.
        facts_sent: whether the small facts went with a reduction.
    """

    comm: Collective
    key: str
    reduce_op: str
    count: Any
    total: Any
    ghost: Any = None
    label: Any = None
    weighted: set[int] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    applied: bool = False
    facts_sent: bool = False
    probed: list[list[Any]] | None = None  # where a list: `apply` leaves its gradients here and does nothing else
    calls: Any = field(default_factory=itertools.count)

    @property
    def weight(self) -> tf.Tensor:
        """What this rank's loss counts, float32: its share of the joined batch ("mean"), else 1; 0 for a ghost."""
        if self.reduce_op == "mean":
            return tf.cast(self.count, tf.float32) / tf.cast(self.total, tf.float32)
        return tf.cast(tf.greater(self.count, 0), tf.float32)

    def weigh(self, gradients: list[Any]) -> list[Any]:
        """Gradients of a loss that was not weighted before, weighted afterwards."""

        def one(values: tf.Tensor) -> tf.Tensor:
            return values * tf.cast(self.weight, values.dtype)

        return [None if g is None else sparse.on_values(g, one) for g in gradients]

    def silenced(self, value: tf.Tensor) -> tf.Tensor:
        """`value`, or zeros where this rank is a ghost."""
        if self.ghost is None:
            return value
        return tf.where(self.ghost, tf.zeros_like(value), value)

    def name(self, what: str) -> str:
        """A name for the next collective of this step: by position, so the same on every rank."""
        return f"{self.key}/{what}/{next(self.calls)}"


@contextlib.contextmanager
def entered(step: Step) -> Iterator[Step]:
    """Makes `step` the current one."""
    before = current()
    _here.step = step
    try:
        yield step
    finally:
        _here.step = before


def begin(data: Any, comm: Collective, key: str, reduce_op: str) -> tuple[Step, Any]:
    """The step for what a pipeline handed out, and the data in it.

    A batch that is no `Share` (as from `train_on_batch`) is this rank's part of a batch whose size the ranks
    must first tell each other.
    """
    if isinstance(data, Share):
        ghost = None if isinstance(data.ghost, tuple) else data.ghost
        label = None if isinstance(data.label, tuple) else data.label
        return Step(comm, key, reduce_op, data.count, data.total, ghost, label), data.data
    count = rows(data)
    total = comm.all_reduce(count, f"{key}/rows", "sum")
    return Step(comm, key, reduce_op, count, total), data
