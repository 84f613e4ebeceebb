"""What workers run where the chief makes one update of what several of them computed.

A worker leaves its part on the ps tasks (`deposits`) and tells the chief, which combines the parts that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import private
from tfdist.ps.store import Store
from tfdist.ps.work import Order, Work


class ShareWork(Work):
    """A call is a share of a joined batch: its gradient is left, and the chief gets the weight of its loss."""

    joined = True
    fact = tf.float32

    def _update(
        self, batch: Any, metrics: list[tf.Tensor], order: Order, step: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], Any]:
        pulled = self._store.pull()
        found = self._compute(batch, pulled.values, pulled.statistics, metrics, order, step)
        with tf.control_dependencies(self._store.deposit(found.gradients, found.changes, order.call)):
            return tf.identity(found.weight), found.metrics, found.logs


class LocalWork(Work):
    """A call is a few steps on a copy of the parameters and slots in the worker's memory, which is left at the end."""

    fact = tf.float32
    _copy: Copy

    def _call(self, order: Order, tensors: Sequence[Any], spec: Any, several: bool) -> dict[str, Any]:
        self._copy = Copy(self._store, f"{self._name}.copy")
        result = super()._call(order, tensors, spec, several)
        with tf.control_dependencies([result["facts"]]):
            done = self._copy.deposit(order.call)
        with tf.control_dependencies(done):
            return {**result, "facts": tf.identity(result["facts"])}

    def _update(
        self, batch: Any, metrics: list[tf.Tensor], order: Order, step: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], Any]:
        copy = self._copy
        found = self._compute(batch, copy.values(), copy.statistics(), metrics, order, step)
        copy.update(found.gradients, found.changes, order.rate)
        return found.weight, found.metrics, found.logs


class Copy:
    """A store's values in a worker's memory, filled from the ps tasks where this is built."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._pairs: list[list[tuple[Any, Any]]] = []  # by part: (the ps task's Keras variable, its copy)
        self._statistics: list[Any] = []
        self._before: list[tf.Tensor] = []
        for j, part in enumerate(store.parts):
            pairs = []
            for i, variable in enumerate([*part.kept, *part.optimizer.variables]):
                with tf.device(part.device):
                    value = variable.value.read_value()
                pairs.append((variable, private.local_variable(f"{name}.{j}.{i}", value, variable)))
            self._pairs.append(pairs)
            self._before += part.read_statistics()
        for i, value in enumerate(self._before):
            self._statistics.append(private.local_variable(f"{name}.statistic{i}", value))

    def values(self) -> list[tf.Tensor | None]:
        """Of the model's variables."""
        held = [
            [copy.read_value() for _, copy in pairs[: len(part.holdings)]]
            for part, pairs in zip(self._store.parts, self._pairs, strict=True)
        ]
        return self._store.by_variable(held)

    def statistics(self) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self._statistics]

    def update(self, gradients: Sequence[Any], changes: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """One step of the optimizer on the copy."""
        for part, pairs in zip(self._store.parts, self._pairs, strict=True):
            with private.holding(pairs):
                part.update(self._store.parcels(part, gradients), rate)
        for variable, change in zip(self._statistics, changes, strict=True):
            variable.assign_add(change)

    def deposit(self, call: tf.Tensor) -> list[tf.Operation]:
        """Leaves the copy on the ps tasks."""
        changes = [new - old for new, old in zip(self.statistics(), self._before, strict=True)]
        return [
            part.deposit(call, [*(copy.read_value() for _, copy in pairs), *(changes if part.statistics else [])])
            for part, pairs in zip(self._store.parts, self._pairs, strict=True)
        ]
