"""What a worker runs: steps of training, each on freshly pulled values, each pushed as one update."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.ps import mirror
from tfdist.ps.form import Form, check
from tfdist.ps.store import Store
from tfdist.ps.tables import Tables

# Batches of a call. When its worker dies all are computed again, so not too many.
MOST_STEPS = 10

_here = threading.local()


@dataclass
class Collected:
    """The step that is being traced: where the optimizer leaves its gradients instead of applying them.

    Attributes:
      tables: whose rows can be looked up.
      share: the samples' part of a joined batch, a float32 scalar; None where the batch is an update of its own.
      divisor: what the loss was divided by, where it is not the number of samples.
      losses: how many were computed.
    """

    optimizer: Any
    tables: Tables
    share: tf.Tensor | None = None
    gradients: list[Any] | None = None
    variables: list[Any] = field(default_factory=list)
    divisor: tf.Tensor | None = None
    losses: int = 0


def current() -> Collected | None:
    """The step that surrounds the caller, or None outside of a worker's step."""
    return getattr(_here, "collected", None)


@contextlib.contextmanager
def _collecting(collected: Collected) -> Iterator[Collected]:
    _here.collected = collected
    try:
        yield collected
    finally:
        _here.collected = None


@dataclass(frozen=True)
class Order:
    """What a call's steps have in common.

    Attributes:
      call: its number.
      rate: the learning rate.
      share: the samples' part of a joined batch.
      held: values of the store's held variables.
    """

    call: tf.Tensor
    rate: tf.Tensor
    share: tf.Tensor
    held: list[tf.Tensor]


@dataclass(frozen=True)
class Computed:
    """What one step gave: by variable; what it added to the statistics; metrics after it; the weight of its loss."""

    gradients: list[Any]
    changes: list[tf.Tensor]
    metrics: list[tf.Tensor]
    logs: Any
    weight: tf.Tensor


class Work:
    """The graph of a call: batches in, one update each, and what to tell the chief.

    Args:
      model: distributed, built and compiled.
      store: of its optimizer and variables.
      metrics: variables of the model's metrics; they start each call as they are now.
      seeds: states of the model's random layers.
      name: unique in the job.

    Attributes:
      unwritten: indices of statistics that the step turned out to read only.
      needed_whole: indices of tables that the model turned out to use otherwise than by looking up rows.
    """

    joined = False  # whether a batch is a part of what makes one update
    fact = tf.int64  # what the chief is to know of a step

    def __init__(self, model: Any, store: Store, metrics: list[Any], seeds: list[Any], name: str) -> None:
        self._model, self._store, self._name = model, store, name
        self._metrics, self._seeds = metrics, seeds
        self._fresh = [v.numpy() for v in metrics]
        self._seed = [v.numpy() for v in seeds]
        self._step = tf.function(self._one, autograph=False, reduce_retracing=True)
        self._traced: dict[Any, Any] = {}
        self.needed_whole: set[int] = set()
        self.unwritten: set[int] = set()
        self._form = Form()
        self._alive: list[Any] = []  # graphs refer to variables, but do not keep them

    def call(self, batches: Sequence[Any], spec: Any) -> tuple[Any, list[tf.Tensor]]:
        """The function for a call, and its arguments after the order (`ordered`).

        Args:
          batches: one of any kind, or several that `stackable` says can go together.
          spec: their type, with None where they have None.
        """
        specs = [_any_length(s) if self.joined else s for s in tf.nest.flatten(spec) if s is not None]
        flat = [[t for t in tf.nest.flatten(batch) if t is not None] for batch in batches]
        # A loop even for one batch, where there may be more: setting up one graph takes half the time of two.
        several = not self.joined and all(_dense(t) for t in flat[0])
        key = (several, tuple(specs))
        if key not in self._traced:
            if several:
                specs = [tf.TensorSpec([None, *s.shape], s.dtype) for s in specs]

            def work(numbers: tf.Tensor, *tensors: tf.Tensor) -> dict[str, Any]:
                call, stamp = (tf.cast(numbers[i], tf.int64) for i in (0, 3))
                rate, share = (tf.cast(numbers[i], tf.float32) for i in (1, 2))
                order = Order(call, rate, share, self._store.held.here(stamp))
                return self._form.packed(self._call(order, tensors, spec, several))

            self._traced[key] = tf.function(work, autograph=False).get_concrete_function(
                tf.TensorSpec((4,), tf.float64), *specs
            )
        return self._traced[key], [tf.stack(column) for column in zip(*flat, strict=True)] if several else flat[0]

    def result(self, returned: Any) -> dict[str, Any]:
        """What a call returned: "facts" of each step, "logs", and "metrics": (variable, value before, value after)."""
        found = self._form.taken_apart(returned)
        return {**found, "metrics": list(zip(self._metrics, self._fresh, found["metrics"], strict=True))}

    def _call(self, order: Order, tensors: Sequence[Any], spec: Any, several: bool) -> dict[str, Any]:
        return self._several(order, tensors, spec) if several else self._single(order, tensors, spec)

    def _single(self, order: Order, tensors: Sequence[Any], spec: Any) -> dict[str, Any]:
        fact, metrics, logs = self._update(_filled(spec, tensors), self._start(), order, tf.constant(0, tf.int64))
        return {"metrics": metrics, "facts": fact[tf.newaxis], "logs": logs}

    def _several(self, order: Order, tensors: Sequence[Any], spec: Any) -> dict[str, Any]:
        """A loop over the first axis: its graph, and what setting it up takes, are those of one step."""
        count = tf.shape(tensors[0], tf.int64)[0]

        def again(step: tf.Tensor, *_: Any) -> tf.Tensor:
            return step < count

        def once(step: tf.Tensor, facts: tf.TensorArray, metrics: list[tf.Tensor], logs: Any) -> Any:
            batch = _filled(spec, [t[step] for t in tensors])
            found, metrics, logs = self._update(batch, metrics, order, step)
            return step + 1, facts.write(tf.cast(step, tf.int32), found), metrics, logs

        batch = _filled(spec, [tf.TensorSpec(t.shape[1:], t.dtype) for t in tensors])
        logs = tf.nest.map_structure(lambda like: tf.zeros(like.shape, like.dtype), self._logs_of(batch))
        facts = tf.TensorArray(self.fact, tf.cast(count, tf.int32))
        _, facts, metrics, logs = tf.while_loop(
            again, once, (tf.constant(0, tf.int64), facts, self._start(), logs), parallel_iterations=1
        )
        return {"metrics": metrics, "facts": facts.stack(), "logs": logs}

    def _logs_of(self, batch: Any) -> Any:
        """What a step on such a batch logs, as specs: a loop has to know it before its first step."""
        store = self._store

        def like(variable: Any) -> tf.TensorSpec:
            return tf.TensorSpec(variable.shape, keras.backend.standardize_dtype(variable.dtype))

        values = [like(v) for i, v in enumerate(store.variables) if i not in store.tables]
        held = [like(v) for v in store.held.variables]
        traced = self._step.get_concrete_function(
            batch,
            values,
            [like(v) for v in store.statistics],
            [tf.TensorSpec(v.shape, v.dtype) for v in self._fresh],
            held,
            tf.TensorSpec((), tf.int64),
            tf.TensorSpec((), tf.float32),
        )
        logs = Computed(*traced.structured_outputs).logs
        check(tf.nest.flatten(logs))
        return logs

    def _start(self) -> list[tf.Tensor]:
        return [tf.constant(value) for value in self._fresh]

    def _update(
        self, batch: Any, metrics: list[tf.Tensor], order: Order, step: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], Any]:
        """One step of a call.

        Returns:
          what the chief is to know of it (here how late the update was, int64), metrics after it, the step's logs.
        """
        pulled = self._store.pull()
        found = self._compute(batch, pulled.values, pulled.statistics, metrics, order, step)
        late = self._store.push(found.gradients, found.changes, order.rate, pulled, (order.call, step))
        return late, found.metrics, found.logs

    def _compute(
        self,
        batch: Any,
        values: list[tf.Tensor | None],
        statistics: list[tf.Tensor],
        metrics: list[tf.Tensor],
        order: Order,
        step: tf.Tensor,
    ) -> Computed:
        number = order.call * MOST_STEPS + step
        there = [value for value in values if value is not None]
        return Computed(*self._step(batch, there, statistics, metrics, order.held, number, order.share))

    def _one(
        self,
        batch: Any,
        values: list[tf.Tensor],
        statistics: list[tf.Tensor],
        metrics: list[tf.Tensor],
        held: list[tf.Tensor],
        number: tf.Tensor,
        share: tf.Tensor,
    ) -> tuple[list[Any], list[tf.Tensor], list[tf.Tensor], Any, tf.Tensor]:
        """One step of the model on given values, as the fields of `Computed`."""
        store = self._store
        # Of each update another seed; the odd factor (Knuth's) keeps neighbours apart and meets none twice in 2**32.
        number = tf.cast(tf.math.floormod(number * 2654435761, 2**32), tf.uint32)
        seeds = [tf.stack([tf.constant(seed[0]) + number, tf.constant(seed[1])]) for seed in self._seed]
        others = _paired(
            [*store.statistics, *self._metrics, *self._seeds, *store.held.variables],
            [*statistics, *metrics, *seeds, *held],
        )
        dense = [v for i, v in enumerate(store.variables) if i not in store.tables]
        tables = Tables(store, self._name)
        with _collecting(Collected(store.optimizer, tables, share if self.joined else None)) as collected:
            try:
                logs, after = mirror.run(
                    lambda: self._model.train_step(batch),
                    _paired(dense, values),
                    others,
                    self._name,
                    tables.anchors(),
                    self._alive,
                )
            finally:
                self.needed_whole |= tables.needed
        count = len(statistics)
        self.unwritten = {i for i, (new, old) in enumerate(_paired(after[:count], statistics)) if new is old}
        changes = [new - old for new, old in _paired(after[:count], statistics)]
        weight = tf.cast(_rows_of(batch), tf.float32)
        if collected.divisor is not None:
            if collected.losses > 1:
                raise ValueError(
                    f"Model {self._model.name!r} has {collected.losses} losses, one of them masked or weighted so that "
                    "it is not divided by the number of samples. Under Sync that works for a single loss only: use "
                    "RingAllReduceStrategy, or reduction='sum_over_batch_size' without masks."
                )
            weight = tf.cast(collected.divisor, tf.float32)
        return self._by_variable(collected), changes, after[count : count + len(metrics)], logs, weight

    def _by_variable(self, collected: Collected) -> list[Any]:
        if collected.gradients is None:
            raise ValueError(
                f"The train_step of {self._model.name!r} applied no optimizer, so no worker would ever send a "
                "gradient. Use `self.optimizer.apply(gradients, variables)` with the optimizer given to compile()."
            )
        found = {id(v): g for v, g in zip(collected.variables, collected.gradients, strict=True)}
        return [self._store.dense(index, found.get(id(v))) for index, v in enumerate(self._store.variables)]


def ordered(call: int, rate: float, share: float, stamp: int) -> np.ndarray:
    """What the chief tells with a call, as one tensor: each would be a message of its own."""
    return np.array([call, rate, share, stamp], np.float64)


def _paired(some: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(some, others, strict=True))


def stackable(one: Any, other: Any) -> bool:
    """Whether two batches can be in one call: plain tensors of the same shapes."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(a is b is None or (_dense(a) and _dense(b) and a.shape == b.shape) for a, b in pairs)


def _any_length(spec: Any) -> Any:
    """Of a share of what this describes: where all batches have one size, their shares have another."""
    if isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec):
        return type(spec)([None, *spec.shape[1:]], spec.dtype)
    return spec


def _dense(value: Any) -> bool:
    return isinstance(value, tf.Tensor)


def _filled(spec: Any, tensors: Sequence[Any]) -> Any:
    """A batch of the structure of `spec` from its tensors; None where `spec` has None."""
    given = iter(tensors)
    return tf.nest.map_structure(lambda s: None if s is None else next(given), spec)


def _rows_of(batch: Any) -> tf.Tensor:
    """Samples in a batch."""
    first = next(t for t in tf.nest.flatten(batch) if t is not None)
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
