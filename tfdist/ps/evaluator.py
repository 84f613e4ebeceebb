"""The evaluator's end: asks the chief for weights, gives signs of life, and learns when all is over."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.ps import snapshots
from tfdist.ps.snapshots import ALIVE, NOTHING, Collected, Exchange
from tfdist.tasks.serving import FAILED, GONE, LOOK, Silence
from tfdist.tf_config import Cluster, Task

ALIVE_EVERY = 1.0  # seconds between two signs of life


@dataclass(frozen=True)
class Snapshot:
    """The chief's weights at one time.

    Attributes:
      updates: that the optimizer had made.
      arrays: the weights; None where they are those of the snapshot before.
      last: whether no others will follow.
    """

    updates: int
    arrays: list[np.ndarray] | None
    last: bool


class Receiver:
    """Gets weights from the chief of `cluster`, for the evaluator `task`."""

    def __init__(self, cluster: Cluster, task: Task) -> None:
        self.task = task
        self._exchange = Exchange(cluster)
        self._silence = Silence(task.name, self._exchange.whom)
        self._done = self._has_last = False
        self._looked = 0.0
        self._number = random.SystemRandom().randrange(1, 1 << 40) << snapshots.WHO

    def next(self, like: Sequence[np.ndarray]) -> Snapshot | None:
        """Waits for weights of the shapes and types of `like`; None when the chief is done.

        Raises:
          SystemExit: the chief failed, or vanished.
          ValueError: the chief's weights have other shapes or types.
        """
        self._number += 1
        collected, asked = Collected(self._number), False
        while True:
            try:
                if not asked:
                    self._exchange.ask(self._number)
                    asked = True
                for _ in range(self._look()["weights"]):
                    header, piece = self._exchange.receive()
                    data = collected.add(header, piece)
                    if data is None:
                        continue
                    if len(data) and header.layout != snapshots.layout(like):
                        raise ValueError(
                            f"{self.task.name} received weights of other shapes or types than its model's: "
                            f"{len(data):,} bytes, expected {sum(a.nbytes for a in like):,}. Run the same script with "
                            "the same arguments in every task, and call fit() of the same model first."
                        )
                    self._has_last = bool(header.last)
                    return Snapshot(header.updates, snapshots.shaped(data, like) if len(data) else None, self._has_last)
            except tf.errors.OpError as error:
                asked = False  # the chief may be a new one
                self._judge(error)
            if self._done:
                return None
            time.sleep(LOOK)

    def pulse(self) -> None:
        """To be called now and then while weights are evaluated.

        Raises:
          SystemExit: the chief failed, or vanished, and these are not its last weights.
        """
        if time.monotonic() - self._looked < ALIVE_EVERY:
            return
        try:
            if not self._look()["asked"]:
                self._exchange.ask(ALIVE)
        except tf.errors.OpError as error:
            self._judge(error)

    def evaluated(self) -> None:
        """To be called when the last weights are evaluated, for which the chief waits."""
        with contextlib.suppress(tf.errors.OpError):
            self._exchange.ask(-self._number)

    def decline(self) -> None:
        """Tells the chief that nobody wants its weights, so that it does not wait for that at its end.

        Raises:
          SystemExit: the chief failed, or never came.
        """
        while True:
            try:
                if not self._look()["done"]:
                    self._exchange.ask(NOTHING)
                return
            except tf.errors.OpError as error:
                self._judge(error)
            time.sleep(LOOK)

    def _look(self) -> dict[str, int]:
        self._looked = time.monotonic()
        sizes = self._exchange.sizes()
        self._silence.broken()
        self._done = bool(sizes["done"])
        if sizes["failed"] and not self._has_last:
            raise SystemExit(FAILED)
        return sizes

    def _judge(self, error: tf.errors.OpError) -> None:
        """A chief that is done, or has given its last weights, may be gone."""
        if not (self._done or self._has_last) and self._silence.too_long(error):
            raise SystemExit(GONE)
