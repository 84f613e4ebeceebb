"""What one ps task keeps of a model: its holdings, an optimizer of its own for them, and how updates come in.

An update that is applied when it comes runs in the ps, one at a time, so slots and counters see no race. It carries
the number of its call and its step within it; the ps notes with the update how far a call has come, so that a call
that is run again (its worker died) updates nothing twice::

    worker:  pull  -> step -> gradients, clipped -> packed by holding ->  push(call 17, step 3)
    ps:      enter; ledger[17] == 3 ? -> optimizer.apply(holdings) ; ledger[17] = 4 : nothing ; leave
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.ps.consistency import Async, Consistency, LocalSGD, Sync
from tfdist.ps.deposits import Deposits, Like
from tfdist.ps.layout import Holding
from tfdist.ps.pieces import gathered
from tfdist.ps.slots import copy_of

LEDGER = 4096  # calls that may be under way at a time; far more than are


class Part:
    """The variables on one ps.

    Args:
      device: of the ps task's CPU.
      holdings: its own.
      optimizer: the user's, on the chief.
      variables: the model's trainable variables, on the chief.
      statistics: other variables, of which this ps keeps the values.
      consistency: how updates come in.
      name: unique in the job.

    Attributes:
      kept: a Keras variable for each holding.
      optimizer: of those.
      statistics: `tf.Variable`s.
      version: updates so far.
    """

    def __init__(
        self,
        device: str,
        holdings: list[Holding],
        optimizer: Any,
        variables: Sequence[Any],
        statistics: Sequence[Any],
        consistency: Consistency,
        name: str,
    ) -> None:
        self.device, self.holdings, self._consistency = device, holdings, consistency
        rate = private.rate_of(optimizer)
        self._schedule = rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
        with tf.device(device):
            self.kept = [_keep(holding, variables, f"{name}.{i}") for i, holding in enumerate(holdings)]
            self.optimizer = copy_of(optimizer, self.kept, lambda h: holdings[h].pieces[0].variable)
            self.statistics = [tf.Variable(v.value, trainable=False) for v in statistics]
            self.version = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._ledger = tf.Variable(tf.fill([LEDGER, 2], tf.constant(-1, tf.int64)), trainable=False)
            self._section = tf.CriticalSection(name="update", shared_name=name)
        self._deposits: Deposits | None = None
        if isinstance(consistency, Sync | LocalSGD):
            self._deposits = Deposits(device, self._deposited(), f"{name}.deposits")

    # -- in a worker's graph ---------------------------------------------------------------------------------

    def read(self, index: int) -> tf.Tensor:
        """The value of a holding."""
        with tf.device(self.device):
            return self.kept[index].value.read_value()

    def rows(self, index: int, numbers: tf.Tensor) -> tf.Tensor:
        """Rows of a table's holding, by their numbers in it; only they leave the ps."""
        with tf.device(self.device):
            return tf.gather(self.kept[index].value, numbers)

    def read_version(self) -> tf.Tensor:
        with tf.device(self.device):
            return self.version.read_value()

    def read_statistics(self) -> list[tf.Tensor]:
        with tf.device(self.device):
            return [variable.read_value() for variable in self.statistics]

    def update(self, parcels: Sequence[Any], rate: tf.Tensor, late: tf.Tensor | int = 0) -> None:
        """One step of the optimizer, at the place of its variables."""
        if self._schedule is not None:
            rate = tf.cast(self._schedule(self.optimizer.iterations), tf.float32)
        if isinstance(self._consistency, Async) and self._consistency.correction == "scale":
            rate = rate / tf.cast(tf.maximum(late, 1), tf.float32)
        self.optimizer.learning_rate = rate
        self.optimizer.apply(list(parcels), self.kept)

    def push(
        self,
        parcels: list[Any],
        changes: Sequence[tf.Tensor],
        ticket: tf.Tensor,
        version: tf.Tensor,
        then: Sequence[tf.Tensor | None],
    ) -> tf.Tensor:
        """Applies an update unless that was done before; see `Store.push`.

        `ticket` is float64: the learning rate, the number of the call, that of the step within it.
        """
        with tf.device(self.device):
            rate = tf.cast(ticket[0], tf.float32)
            call, step = tf.unstack(tf.cast(ticket[1:], tf.int64))
            slot = tf.math.floormod(call, LEDGER)

        def apply() -> tf.Tensor:
            late = self.version - version
            self.update(self._corrected(parcels, then), rate, late)
            self.version.assign_add(1)
            for variable, change in zip(self.statistics, changes, strict=True):
                variable.assign_add(change)
            self._ledger.scatter_nd_update([[slot]], [tf.stack([call, step + 1])])
            return late

        def once() -> tf.Tensor:
            known, done = tf.unstack(self._ledger[slot])
            done = tf.where(tf.equal(known, call), done, 0)
            return tf.cond(tf.equal(done, step), apply, lambda: tf.constant(-1, tf.int64))

        with tf.device(self.device):
            return self._section.execute(once)

    def deposit(self, call: tf.Tensor, tensors: Sequence[Any]) -> tf.Operation:
        """Leaves what a call has computed until the chief says what counts."""
        return self._deposits.put(call, tensors)

    # -- on the chief, in a graph ----------------------------------------------------------------------------

    def joined(self, calls: tf.Tensor, weights: tf.Tensor) -> tuple[list[Any], list[tf.Tensor]]:
        """What the deposits of `calls` are together, weighted: by holding (and slot), and for the statistics.

        All other deposits are dropped.
        """
        sums = self._deposits.weighted(calls, weights)
        count = len(sums) - len(self.statistics)
        return sums[:count], sums[count:]

    def combine(self, joined: Sequence[Any], changes: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Makes one update of what `joined` gave."""
        with tf.device(self.device):
            if isinstance(self._consistency, LocalSGD):
                for variable, average in zip([*self.kept, *self.optimizer.variables], joined, strict=True):
                    variable.value.assign(average)
            else:
                self.update(joined, rate)
            self.version.assign_add(1)
            for variable, change in zip(self.statistics, changes, strict=True):
                variable.assign_add(change)

    def _deposited(self) -> list[Like]:
        """What a deposit consists of."""
        if isinstance(self._consistency, LocalSGD):
            likes = [Like(v.value.shape, v.value.dtype) for v in (*self.kept, *self.optimizer.variables)]
        else:
            likes = [
                Like(v.value.shape, v.value.dtype, bool(h.deal)) for h, v in zip(self.holdings, self.kept, strict=True)
            ]
        return [*likes, *(Like(v.shape, v.dtype) for v in self.statistics)]

    def _corrected(self, parcels: list[Any], then: Sequence[tf.Tensor | None]) -> list[Any]:
        if not compensates(self._consistency):
            return parcels
        strength = self._consistency.strength
        return [
            parcel if old is None else parcel + strength * parcel * parcel * (kept.value - old)
            for parcel, kept, old in zip(parcels, self.kept, then, strict=True)
        ]


def compensates(consistency: Consistency) -> bool:
    """Whether a push must bring the parameters along that its gradient was computed on."""
    return isinstance(consistency, Async) and consistency.correction == "dc"


def _keep(holding: Holding, variables: Sequence[Any], name: str) -> Any:
    kept = keras.Variable(gathered(holding, variables), dtype=holding.dtype, name=name.replace("/", "."))
    if holding.alone:
        kept.constraint = variables[holding.pieces[0].variable].constraint
    return kept
