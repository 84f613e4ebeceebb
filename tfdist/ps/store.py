"""A model's parameters and optimizer on the ps tasks: loaded by the chief, used by workers, fetched back.

Each ps keeps its holdings (`layout`) and an optimizer of its own for them, a copy of the user's. An update of a ps
runs in that ps, one at a time, so slots and counters see no race. It carries the number of its call and its step
within it; each ps notes with the update how far a call has come, so that a call that is run again (its worker died)
updates nothing twice::

    worker:  pull  -> step -> gradients, clipped -> packed by holding ->  push(call 17, step 3)
    ps j:    enter; ledger[17] == 3 ? -> optimizer.apply(holding) ; ledger[17] = 4 : nothing ; leave
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import fusion
from tfdist.comm.buckets import Row
from tfdist.ps import layout
from tfdist.ps.slots import Slots, copy_of, stands_alone

LEDGER = 4096  # calls that may be under way at a time; far more than are


class Store:
    """The state of one optimizer and the variables it trains, on ps tasks.

    Args:
      devices: of the ps tasks' CPUs.
      optimizer: the user's, built; it stays on the chief.
      variables: the trainable Keras variables, on the chief.
      statistics: other Keras variables that steps read and write; what workers add to them is summed.
      name: unique in the job.

    Attributes:
      holdings: who holds what.
    """

    def __init__(
        self, devices: Sequence[str], optimizer: Any, variables: list[Any], statistics: list[Any], name: str
    ) -> None:
        self.optimizer, self.variables, self.statistics = optimizer, variables, statistics
        self.rows = [_row(v) for v in variables]
        alone = {i for i, v in enumerate(variables) if stands_alone(optimizer, v)}
        self.holdings = layout.plan(self.rows, len(devices), alone)
        self.parts = [
            _Part(self, device, [h for h in self.holdings if h.ps == j], f"{name}.ps{j}")
            for j, device in enumerate(devices)
            if any(h.ps == j for h in self.holdings)
        ]
        with tf.device(self.parts[-1].device):
            self._statistics = [tf.Variable(v.value, trainable=False) for v in statistics]
        self._version = self.parts[0].version

    # -- on the chief ----------------------------------------------------------------------------------------

    def load(self) -> None:
        """The chief's values to the ps tasks: parameters, slots, counters, statistics."""
        slots = Slots(self.optimizer, len(self.variables))
        for part in self.parts:
            mine = Slots(part.optimizer, len(part.holdings))
            for theirs, own in zip(slots.shared, mine.shared, strict=True):
                own.assign(theirs.value)
            for holding, kept, row in zip(part.holdings, part.kept, mine.rows, strict=True):
                kept.assign(_gathered(holding, self.variables))
                for attribute, slot in row.items():
                    slot.assign(_gathered(holding, slots.of(attribute)))
        for kept, variable in zip(self._statistics, self.statistics, strict=True):
            kept.assign(variable.value)

    def fetch(self) -> None:
        """The ps tasks' values to the chief."""
        slots = Slots(self.optimizer, len(self.variables))
        found: dict[str | None, dict[int, list[tuple[int, tf.Tensor]]]] = {}
        for part in self.parts:
            mine = Slots(part.optimizer, len(part.holdings))
            if part is self.parts[0]:
                for theirs, own in zip(slots.shared, mine.shared, strict=True):
                    theirs.assign(own.value)
            for holding, kept, row in zip(part.holdings, part.kept, mine.rows, strict=True):
                for attribute, tensor in ((None, kept), *row.items()):
                    if holding.alone:
                        target = self.variables if attribute is None else slots.of(attribute)
                        target[holding.pieces[0].variable].assign(tensor.value)
                        continue
                    pieces = fusion.unpack(tf.identity(tensor.value), [(p.stop - p.start,) for p in holding.pieces])
                    for piece, part_of in zip(holding.pieces, pieces, strict=True):
                        place = found.setdefault(attribute, {}).setdefault(piece.variable, [])
                        place.append((piece.start, part_of))
        for attribute, by_variable in found.items():
            target = self.variables if attribute is None else slots.of(attribute)
            for index, pieces in by_variable.items():
                target[index].assign(_joined(pieces, target[index].shape))
        for kept, variable in zip(self._statistics, self.statistics, strict=True):
            variable.assign(kept)

    def updates(self) -> int:
        """Updates that every ps has applied, since the store was made."""
        return min(int(part.version) for part in self.parts)

    # -- in a worker's graph ---------------------------------------------------------------------------------

    def pull(self) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor]:
        """Values of the variables and of the statistics, and the version they are of."""
        found: dict[int, list[tuple[int, tf.Tensor]]] = {}
        with tf.device(self.parts[0].device):
            version = self._version.read_value()
        for part in self.parts:
            for holding, kept in zip(part.holdings, part.kept, strict=True):
                with tf.device(part.device):
                    value = kept.value.read_value()
                shapes = [(p.stop - p.start,) for p in holding.pieces]
                pieces = [value] if holding.alone else fusion.unpack(value, shapes)
                for piece, part_of in zip(holding.pieces, pieces, strict=True):
                    found.setdefault(piece.variable, []).append((piece.start, part_of))
        values = [_joined(found[i], v.shape) for i, v in enumerate(self.variables)]
        statistics = []
        for variable in self._statistics:
            with tf.device(variable.device):
                statistics.append(variable.read_value())
        return values, statistics, version

    def push(
        self,
        gradients: Sequence[tf.Tensor],
        changes: Sequence[tf.Tensor],
        rate: tf.Tensor,
        version: tf.Tensor,
        work: tuple[tf.Tensor, tf.Tensor],
    ) -> tf.Tensor:
        """Applies one update, unless that was done before.

        Args:
          gradients: of the variables, dense.
          changes: what is added to the statistics.
          rate: the learning rate, where the optimizer follows no schedule.
          version: that `pull` gave with the values the gradients are of.
          work: number of the call and of the step within it, int64.

        Returns:
          int64: how many updates others have made since the pull; -1 where this one was done before.
        """
        late = []
        for part in self.parts:
            parcels = [
                gradients[h.pieces[0].variable] if h.alone else fusion.pack(_pieces(h, gradients))
                for h in part.holdings
            ]
            extra = list(zip(self._statistics, changes, strict=True)) if part is self.parts[-1] else []
            late.append(part.push(parcels, extra, rate, version, work))
        with tf.control_dependencies(late):  # an update is done when every ps has its part
            return tf.identity(late[0])


class _Part:
    """What one ps task keeps of a store."""

    def __init__(self, store: Store, device: str, holdings: list[layout.Holding], name: str) -> None:
        self.device, self.holdings = device, holdings
        with tf.device(device):
            self.kept = [self._keep(store, holding, f"{name}.{i}") for i, holding in enumerate(holdings)]
            self.optimizer = copy_of(store.optimizer, self.kept, lambda h: holdings[h].pieces[0].variable)
            self.version = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.ledger = tf.Variable(tf.fill([LEDGER, 2], tf.constant(-1, tf.int64)), trainable=False)
            self._section = tf.CriticalSection(name="update", shared_name=name)

    @staticmethod
    def _keep(store: Store, holding: layout.Holding, name: str) -> Any:
        kept = keras.Variable(_gathered(holding, store.variables), dtype=holding.dtype, name=name.replace("/", "."))
        if holding.alone:
            kept.constraint = store.variables[holding.pieces[0].variable].constraint
        return kept

    def push(self, parcels: list[tf.Tensor], extra: list[Any], rate: Any, version: Any, work: Any) -> tf.Tensor:
        call, step = work
        slot = tf.math.floormod(call, LEDGER)

        def apply() -> tf.Tensor:
            late = self.version - version
            if not private.follows_schedule(self.optimizer):
                self.optimizer.learning_rate = rate
            self.optimizer.apply(parcels, self.kept)
            for variable, change in extra:
                variable.assign_add(change)
            self.version.assign_add(1)
            self.ledger.scatter_nd_update([[slot]], [tf.stack([call, step + 1])])
            return late

        def once() -> tf.Tensor:
            known, done = tf.unstack(self.ledger[slot])
            done = tf.where(tf.equal(known, call), done, 0)
            return tf.cond(tf.equal(done, step), apply, lambda: tf.constant(-1, tf.int64))

        with tf.device(self.device):
            return self._section.execute(once)


def _row(variable: Any) -> Row:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return Row(variable.path, tuple(variable.shape), dtype, math.prod(variable.shape) * tf.as_dtype(dtype).size)


def _pieces(holding: layout.Holding, tensors: Sequence[Any]) -> list[tf.Tensor]:
    found = []
    for piece in holding.pieces:
        flat = tf.reshape(tf.convert_to_tensor(tensors[piece.variable]), [-1])
        found.append(flat if piece.stop - piece.start == flat.shape[0] else flat[piece.start : piece.stop])
    return found


def _gathered(holding: layout.Holding, variables: Sequence[Any]) -> tf.Tensor:
    """A holding's tensor, from values by variable."""
    if holding.alone:
        return tf.convert_to_tensor(variables[holding.pieces[0].variable])
    return fusion.pack(_pieces(holding, variables))


def _joined(pieces: list[tuple[int, tf.Tensor]], shape: Any) -> tf.Tensor:
    """A variable's value from its pieces, each with its first element's number."""
    flat = [tensor for _, tensor in sorted(pieces, key=lambda p: p[0])]
    return tf.reshape(flat[0] if len(flat) == 1 else tf.concat(flat, axis=0), shape)
