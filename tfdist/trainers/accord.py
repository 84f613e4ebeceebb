"""What a process wants of all of them at once: to stop training, to write a checkpoint, to leave.

A wish of one rank must become all ranks' at the same step. It travels with the step's first reduction
(`Switchboard.facts`), so it costs no message of its own:

    step k       rank 1 wants             wish [0, 0, 1]
    step k + 1   summed with gradients    agreed [0, 0, 1] on every rank, which acts when the step is over
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.comm.collective import Collective

STOP, SAVE, LEAVE = range(3)
COUNT = 3


class Accord:
    """Of a process that trains alone: what it wants is agreed."""

    def __init__(self) -> None:
        self._mine = np.zeros(COUNT, np.float32)

    def want(self, which: int, value: bool = True) -> None:
        """Wants it, or no longer."""
        self._mine[which] = value

    def agreed(self, which: int) -> bool:
        """Whether some process wanted it: the answer, the same everywhere after a step."""
        return bool(self._mine[which])

    def settle(self) -> None:
        """Asks every process, between epochs; all call it."""

    def drop(self, which: int) -> None:
        """What was agreed is done; all call it."""
        self.want(which, False)


class RankAccord(Accord):
    """Of a rank: `mine` goes into a reduction as float32 of shape (3,), and its sum comes back by `learn`."""

    def __init__(self, comm: Collective, key: str) -> None:
        super().__init__()
        self._comm, self._key = comm, key
        with tf.init_scope():
            self.mine = tf.Variable(tf.zeros(COUNT), trainable=False, name="tfdist_wishes")
            self._agreed = tf.Variable(tf.zeros(COUNT), trainable=False, name="tfdist_agreed")

    def want(self, which: int, value: bool = True) -> None:
        super().want(which, value)
        self.mine.assign(self._mine)

    def agreed(self, which: int) -> bool:
        return bool(self._agreed.numpy()[which] > 0.5)

    def learn(self, total: tf.Tensor) -> None:
        """Takes in the sum of all ranks' wishes."""
        self._agreed.assign(total)

    def settle(self) -> None:
        self._agreed.assign(self._comm.all_reduce(self.mine.value(), f"{self._key}/wishes", "max"))

    def drop(self, which: int) -> None:
        super().drop(which)
        now = self._agreed.numpy()
        now[which] = 0.0
        self._agreed.assign(now)
