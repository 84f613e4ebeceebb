"""What a worker runs: a few steps of training, each on freshly pulled values, each pushed as one update."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.ps import mirror
from tfdist.ps.store import Store

# Batches of a call. When its worker dies all are computed again, so not too many.
MOST_STEPS = 10

_here = threading.local()


@dataclass
class Collected:
    """The step that is being traced: where the optimizer leaves its gradients instead of applying them."""

    optimizer: Any
    gradients: list[Any] | None = None
    variables: list[Any] = field(default_factory=list)


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


class Work:
    """The graph of a call: `steps` batches in, one update each, and what to tell the chief.

    Args:
      model: distributed, built and compiled.
      store: of its optimizer and variables.
      metrics: variables of the model's metrics; they start each call as they are now.
      seeds: states of the model's random layers.
      name: unique in the job.
    """

    def __init__(self, model: Any, store: Store, metrics: list[Any], seeds: list[Any], name: str) -> None:
        self._model, self._store, self._name = model, store, name
        self._metrics, self._seeds = metrics, seeds
        self._fresh = [v.numpy() for v in metrics]
        self._seed = [v.numpy() for v in seeds]
        self._step = tf.function(self._one, autograph=False, reduce_retracing=True)
        self._traced: dict[Any, Any] = {}

    def call(self, batches: Sequence[Any], spec: Any) -> tuple[Any, list[tf.Tensor]]:
        """The function for a call, and its arguments beside the call's number and the rate.

        Args:
          batches: one of any kind, or several that `stackable` says can go together.
          spec: their type, with None where they have None.
        """
        specs = [s for s in tf.nest.flatten(spec) if s is not None]
        flat = [[t for t in tf.nest.flatten(batch) if t is not None] for batch in batches]
        several = len(batches) > 1
        key = (several, tuple(specs))
        if key not in self._traced:
            if several:
                specs = [tf.TensorSpec([None, *s.shape], s.dtype) for s in specs]

            def work(call: tf.Tensor, rate: tf.Tensor, *tensors: tf.Tensor) -> dict[str, Any]:
                return (self._several if several else self._single)(call, rate, tensors, spec)

            self._traced[key] = tf.function(work, autograph=False).get_concrete_function(
                tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.float32), *specs
            )
        return self._traced[key], [tf.stack(column) for column in zip(*flat, strict=True)] if several else flat[0]

    def metrics_of(self, values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
        """(variable, its value before a call, its value after) from what the call returned."""
        return list(zip(self._metrics, self._fresh, values, strict=True))

    def _single(self, call: tf.Tensor, rate: tf.Tensor, tensors: Sequence[Any], spec: Any) -> dict[str, Any]:
        late, metrics, logs = self._update(_filled(spec, tensors), self._start(), call, tf.constant(0, tf.int64), rate)
        return {"metrics": metrics, "late": late[tf.newaxis], "logs": logs}

    def _several(self, call: tf.Tensor, rate: tf.Tensor, tensors: Sequence[Any], spec: Any) -> dict[str, Any]:
        """A loop over the first axis: its graph, and what setting it up takes, are those of one step."""
        count = tf.shape(tensors[0], tf.int64)[0]

        def again(step: tf.Tensor, *_: Any) -> tf.Tensor:
            return step < count

        def once(step: tf.Tensor, late: tf.TensorArray, metrics: list[tf.Tensor], logs: Any) -> Any:
            batch = _filled(spec, [t[step] for t in tensors])
            found, metrics, logs = self._update(batch, metrics, call, step, rate)
            return step + 1, late.write(tf.cast(step, tf.int32), found), metrics, logs

        first = _filled(spec, [t[0] for t in tensors])
        found, metrics, logs = self._update(first, self._start(), call, tf.constant(0, tf.int64), rate)
        late = tf.TensorArray(tf.int64, tf.cast(count, tf.int32)).write(0, found)
        _, late, metrics, logs = tf.while_loop(
            again, once, (tf.constant(1, tf.int64), late, metrics, logs), parallel_iterations=1
        )
        return {"metrics": metrics, "late": late.stack(), "logs": logs}

    def _start(self) -> list[tf.Tensor]:
        return [tf.constant(value) for value in self._fresh]

    def _update(
        self, batch: Any, metrics: list[tf.Tensor], call: tf.Tensor, step: tf.Tensor, rate: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], Any]:
        """Pull, step, push; how late the update was, the metrics after it, the step's logs."""
        values, statistics, version = self._store.pull()
        gradients, changes, metrics, logs = self._step(batch, values, statistics, metrics, call * MOST_STEPS + step)
        return self._store.push(gradients, changes, rate, version, (call, step)), metrics, logs

    def _one(
        self,
        batch: Any,
        values: list[tf.Tensor],
        statistics: list[tf.Tensor],
        metrics: list[tf.Tensor],
        number: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], Any]:
        """One step of the model on given values: gradients, changes of statistics, metrics, logs."""
        store = self._store
        # Of each update another seed; the odd factor (Knuth's) keeps neighbours apart and meets none twice in 2**32.
        number = tf.cast(tf.math.floormod(number * 2654435761, 2**32), tf.uint32)
        seeds = [tf.stack([tf.constant(seed[0]) + number, tf.constant(seed[1])]) for seed in self._seed]
        others = _paired([*store.statistics, *self._metrics, *self._seeds], [*statistics, *metrics, *seeds])
        with _collecting(Collected(store.optimizer)) as collected:
            logs, after = mirror.run(
                lambda: self._model.train_step(batch), _paired(store.variables, values), others, self._name
            )
        count = len(statistics)
        changes = [new - old for new, old in _paired(after[:count], statistics)]
        return self._by_variable(collected), changes, after[count : count + len(metrics)], logs

    def _by_variable(self, collected: Collected) -> list[tf.Tensor]:
        if collected.gradients is None:
            raise ValueError(
                f"The train_step of {self._model.name!r} applied no optimizer, so no worker would ever send a "
                "gradient. Use `self.optimizer.apply(gradients, variables)` with the optimizer given to compile()."
            )
        found = {id(v): g for v, g in zip(collected.variables, collected.gradients, strict=True)}
        # A variable without a gradient stays as it is under the elementwise rules when its gradient is zero.
        return [
            tf.zeros(v.shape, keras.backend.standardize_dtype(v.dtype))
            if found.get(id(v)) is None
            else tf.cast(tf.convert_to_tensor(found[id(v)]), keras.backend.standardize_dtype(v.dtype))
            for v in self._store.variables
        ]


def _paired(some: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(some, others, strict=True))


def stackable(one: Any, other: Any) -> bool:
    """Whether two batches can be in one call: plain tensors of the same shapes."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(a is b is None or (_dense(a) and _dense(b) and a.shape == b.shape) for a, b in pairs)


def _dense(value: Any) -> bool:
    return isinstance(value, tf.Tensor)


def _filled(spec: Any, tensors: Sequence[Any]) -> Any:
    """A batch of the structure of `spec` from its tensors; None where `spec` has None."""
    given = iter(tensors)
    return tf.nest.map_structure(lambda s: None if s is None else next(given), spec)
