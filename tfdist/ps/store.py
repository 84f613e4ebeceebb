"""A model's parameters and optimizer on the ps tasks: loaded by the chief, used by workers, fetched back.

Each ps keeps its holdings (`layout`) and applies updates to them (`part`); a store is all of them together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.comm import sparse
from tfdist.comm.buckets import Row
from tfdist.ps import clipping, layout
from tfdist.ps.consistency import Async, Consistency, Sync
from tfdist.ps.held import Held
from tfdist.ps.part import Part, compensates
from tfdist.ps.pieces import Joiner, gathered, parcels, size_of
from tfdist.ps.slots import Slots, stands_alone


@dataclass(frozen=True)
class Pulled:
    """What a worker got from the ps tasks.

    Attributes:
      values: of the variables; None for a table, whose rows come when they are asked for.
      statistics: their values.
      versions: updates that each part had seen.
      held: values of the holdings, by part.
    """

    values: list[tf.Tensor | None]
    statistics: list[tf.Tensor]
    versions: list[tf.Tensor]
    held: list[list[tf.Tensor | None]]


class Store:
    """The state of one optimizer and the variables it trains, on ps tasks.

    Args:
      devices: of the ps tasks' CPUs.
      optimizer: the user's, built; it stays on the chief.
      variables: the trainable Keras variables, on the chief.
      statistics: other Keras variables that steps read and write; what workers add to them is summed.
      held: Keras variables that steps only read.
      name: unique in the job.
      consistency: how updates come in.
      tables: indices of variables of which steps need a few rows only.

    Attributes:
      holdings: who holds what.
      rows: the variables as plain values.
    """

    def __init__(
        self,
        devices: Sequence[str],
        optimizer: Any,
        variables: list[Any],
        statistics: list[Any],
        name: str,
        consistency: Consistency | None = None,
        tables: Collection[int] = (),
        held: Sequence[Any] = (),
    ) -> None:
        self.optimizer, self.variables, self.statistics = optimizer, variables, statistics
        self.consistency, self.tables = consistency or Async(), frozenset(tables)
        self.rows = [_row(v) for v in variables]
        alone = {i for i, v in enumerate(variables) if i not in self.tables and stands_alone(optimizer, v)}
        self.holdings = layout.plan(self.rows, len(devices), alone, self.tables)
        used = [j for j in range(len(devices)) if any(h.ps == j for h in self.holdings)]
        self.parts = [
            Part(
                devices[j],
                [h for h in self.holdings if h.ps == j],
                optimizer,
                variables,
                statistics if j == used[-1] else [],
                self.consistency,
                f"{name}.ps{j}",
            )
            for j in used
        ]
        self.held = Held(self.parts, held, f"{name.rpartition('.')[0]}.held")
        self._combine = tf.function(self._combined, autograph=False, reduce_retracing=True)

    # -- on the chief ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """The chief's values to the ps tasks: parameters, slots, counters, statistics."""
        slots = Slots(self.optimizer, len(self.variables))
        for part in self.parts:
            mine = Slots(part.optimizer, len(part.holdings))
            for theirs, own in zip(slots.shared, mine.shared, strict=True):
                own.assign(theirs.value)
            for holding, kept, row in zip(part.holdings, part.kept, mine.rows, strict=True):
                kept.assign(gathered(holding, self.variables))
                for attribute, slot in row.items():
                    slot.assign(gathered(holding, slots.of(attribute)))
        for kept, variable in zip(self.parts[-1].statistics, self.statistics, strict=True):
            kept.assign(variable.value)
        self.held.load()

    def fetch(self) -> None:
        """The ps tasks' values to the chief."""
        slots = Slots(self.optimizer, len(self.variables))
        found: dict[str | None, Joiner] = {}
        for part in self.parts:
            mine = Slots(part.optimizer, len(part.holdings))
            if part is self.parts[0]:
                for theirs, own in zip(slots.shared, mine.shared, strict=True):
                    theirs.assign(own.value)
            for holding, kept, row in zip(part.holdings, part.kept, mine.rows, strict=True):
                for attribute, held in ((None, kept), *row.items()):
                    found.setdefault(attribute, Joiner()).add(holding, tf.identity(held.value))
        for attribute, joiner in found.items():
            target = self.variables if attribute is None else slots.of(attribute)
            for index in joiner.variables():
                target[index].assign(joiner.joined(index, target[index].shape))
        for kept, variable in zip(self.parts[-1].statistics, self.statistics, strict=True):
            variable.assign(kept)

    def lost(self, device: str) -> bool:
        """Whether a ps task, by its device, no longer has what it held."""
        try:
            for part in self.parts:
                if part.device == device:
                    int(part.version)
        except tf.errors.OpError:
            return True
        return False

    def updates(self) -> int:
        """Updates that every ps has applied, since the store was made."""
        return min(int(part.version) for part in self.parts)

    def combine(self, calls: Sequence[int], weights: Sequence[float], rate: float) -> None:
        """Makes one update of what `calls` have deposited, each times its weight; other deposits are dropped."""
        self._combine(tf.constant(calls, tf.int64), tf.constant(weights, tf.float32), tf.constant(rate, tf.float32))

    def _combined(self, calls: tf.Tensor, weights: tf.Tensor, rate: tf.Tensor) -> None:
        found = [part.joined(calls, weights) for part in self.parts]
        gradients = [joined for joined, _ in found]
        if isinstance(self.consistency, Sync):
            gradients = clipping.clipped(self.optimizer, self.parts, gradients)
        for part, mine, (_, changes) in zip(self.parts, gradients, found, strict=True):
            part.combine(mine, changes, rate)

    # -- in a worker's graph ---------------------------------------------------------------------------------

    def pull(self) -> Pulled:
        """What the ps tasks hold now, tables excepted."""
        versions = [part.read_version() for part in self.parts]
        held = [
            [None if holding.deal else part.read(i) for i, holding in enumerate(part.holdings)] for part in self.parts
        ]
        return Pulled(self.by_variable(held), self.parts[-1].read_statistics(), versions, held)

    def by_variable(self, held: Sequence[Sequence[tf.Tensor | None]]) -> list[tf.Tensor | None]:
        """Values of the variables from those of the holdings, by part; None for a table."""
        joiner = Joiner()
        for part, values in zip(self.parts, held, strict=True):
            for holding, value in zip(part.holdings, values, strict=True):
                if value is not None:
                    joiner.add(holding, value)
        there = joiner.variables()
        return [joiner.joined(i, v.shape) if i in there else None for i, v in enumerate(self.variables)]

    def look_up(self, index: int, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table: of shape `ids.shape` + the table's width.

        Raises:
          tf.errors.InvalidArgumentError: at run time, of an id out of range.
        """
        variable = self.variables[index]
        flat = tf.reshape(ids, [-1])
        length = variable.shape[0]
        low, high = tf.reduce_min(flat), tf.reduce_max(flat)
        message = f"{variable.path} has {length} rows, and a batch asks for others: its ids go from, to"
        with tf.control_dependencies([tf.debugging.Assert((low >= 0) & (high < length), [message, low, high])]):
            unique, position = tf.unique(flat)
        holders = self._holders(index)
        deal = holders[0][0].holdings[holders[0][1]].deal
        where = tf.dynamic_partition(tf.range(tf.size(unique)), tf.cast(unique % deal, tf.int32), deal)
        rows = [part.rows(i, tf.gather(unique, w) // deal) for (part, i), w in zip(holders, where, strict=False)]
        found = rows[0] if deal == 1 else tf.dynamic_stitch(where[: len(rows)], rows)
        return tf.reshape(tf.gather(found, position), [*_shape(ids), *variable.shape[1:]])

    def push(
        self,
        gradients: Sequence[Any],
        changes: Sequence[tf.Tensor],
        rate: tf.Tensor,
        pulled: Pulled,
        work: tuple[tf.Tensor, tf.Tensor],
    ) -> tf.Tensor:
        """Applies one update, unless that was done before.

        Args:
          gradients: of the variables, dense; of tables `tf.IndexedSlices`.
          changes: what is added to the statistics.
          rate: the learning rate, where the optimizer follows no schedule.
          pulled: the values the gradients are of.
          work: number of the call and of the step within it, int64.

        Returns:
          int64: how many updates others have made since the pull, at the ps where they were most; -1 where this one
          was done before.
        """
        call, step = work
        # One small tensor to each ps, not three.
        ticket = tf.stack([tf.cast(n, tf.float64) for n in (rate, call, step)])
        late = []
        for j, part in enumerate(self.parts):
            mine, extra = self.parcels(part, gradients), changes if part is self.parts[-1] else []
            then = pulled.held[j] if compensates(self.consistency) else [None] * len(mine)
            late.append(part.push(mine, extra, ticket, pulled.versions[j], then))
        return tf.reduce_max(tf.stack(late))  # an update is done when every ps has its part

    def deposit(self, gradients: Sequence[Any], changes: Sequence[tf.Tensor], call: tf.Tensor) -> list[tf.Operation]:
        """Leaves gradients on the ps tasks until the chief says which count."""
        return [
            part.deposit(call, [*self.parcels(part, gradients), *(changes if part is self.parts[-1] else [])])
            for part in self.parts
        ]

    def parcels(self, part: Part, gradients: Sequence[Any]) -> list[Any]:
        """What a part gets of gradients by variable, for each of its holdings."""
        return parcels(part.holdings, gradients)

    def dense(self, index: int, gradient: Any) -> Any:
        """A gradient as `push` wants it: rows for a table, each once; a tensor for all else."""
        variable = self.variables[index]
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if gradient is None:  # stays as it is under the elementwise rules when its gradient is zero
            if index not in self.tables:
                return tf.zeros(variable.shape, dtype)
            return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], dtype), tf.zeros([0], tf.int32))
        if index in self.tables:
            return sparse.deduplicate(gradient)
        # Of rows that a loop of the model took, TensorFlow does not know the shape.
        return tf.ensure_shape(tf.cast(tf.convert_to_tensor(gradient), dtype), variable.shape)

    def _holders(self, index: int) -> list[tuple[Part, int]]:
        """(part, number of its holding) of a table, by ps."""
        return [
            (part, i)
            for part in self.parts
            for i, holding in enumerate(part.holdings)
            if holding.pieces[0].variable == index and holding.deal
        ]


def _row(variable: Any) -> Row:
    return Row(variable.path, tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype), size_of(variable))


def _shape(ids: tf.Tensor) -> list[Any]:
    """Its dimensions, as numbers where they are known."""
    known = ids.shape.as_list()
    return [tf.shape(ids)[i] if size is None else size for i, size in enumerate(known)]
