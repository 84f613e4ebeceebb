"""The chief's end of the evaluation beside training: hands weights out where they were asked for."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.ps import snapshots
from tfdist.ps.snapshots import ALIVE, NOTHING, Header, Queues

SILENT = 30.0  # seconds without a sign of life after which nobody waits for the evaluator
LONGEST = 600.0  # seconds to wait for it while it lives
TELL = 2.0  # seconds of waiting after which the user hears why


class Offers:
    """Weights of the model that is trained first, for an evaluator, if there is one.

    Nothing here raises because of an evaluator: training does not depend on it.

    Args:
      named: whether TF_CONFIG names an evaluator; one that it does not name is known when it asks.
    """

    def __init__(self, named: bool) -> None:
        self._queues, self._known = Queues(), named
        self._model: Any = None
        self._wanted: int | None = None  # asked for, not sent yet
        self._sent: tuple[int, int, int] | None = None  # to whom, and layout and checksum of the weights sent last
        self._answered: int | None = None
        self._evaluated = False  # the weights that were sent as the last

    def offer(self, model: Any) -> None:
        """Hands the model's weights out if they were asked for, as they are now."""
        if self._model is None:
            self._model = model
        if self._model is not model:
            return
        try:
            self._listen()
            if self._wanted is not None:
                self._send(snapshots.values(model), last=False)
        except tf.errors.OpError as error:
            print(f"tfdist: the evaluator gets no weights this time: {error.message}", file=sys.stderr)

    def finish(self) -> None:
        """Hands out what the weights are at the end of all, and waits until they are evaluated.

        Waits here, while the chief is there, because to others the end of the chief is the end of the job: a launcher,
        or Kubernetes, would end the evaluator soon after it.
        """
        ends = (began := time.monotonic()) + LONGEST
        heard, told = began, False
        try:
            self._listen()
            while self._known and not self._evaluated:
                if self._wanted is not None:  # again by a new evaluator, where the old one has died
                    self._send(snapshots.values(self._model) if self._model is not None else [], last=True)
                now = time.monotonic()
                if now > ends or now - heard > SILENT:
                    print(f"tfdist: the evaluator did not end in {now - began:.0f} s; the chief leaves", flush=True)
                    return
                if now - began > TELL and not told:
                    told = True
                    print("tfdist: waiting for the evaluator", flush=True)
                time.sleep(0.1)
                heard = time.monotonic() if self._listen() else heard
        except tf.errors.OpError as error:
            print(f"tfdist: the evaluator gets no last weights: {error.message}", file=sys.stderr)

    def _listen(self) -> bool:
        """Takes in what was asked; whether the evaluator gave a sign of life."""
        numbers = self._queues.asked()
        for number in numbers:
            if number > ALIVE and number != self._answered:  # which comes twice when its first answer was late
                self._wanted = number
            self._evaluated |= self._answered is not None and number == -self._answered
        if numbers:
            self._known = numbers[-1] != NOTHING
        return bool(numbers)

    def _send(self, arrays: Sequence[np.ndarray], last: bool) -> None:
        number, layout = self._wanted or ALIVE, snapshots.layout(arrays)
        data = snapshots.flat(arrays)
        what = number >> snapshots.WHO, layout, zlib.crc32(data)
        if last and what == self._sent:
            data = data[:0]  # it has them
        updates = int(self._model.optimizer.iterations) if self._model is not None else 0
        for start, piece in snapshots.cut(data):
            self._queues.send(Header(number, updates, layout, start, len(data), int(last)), piece)
        self._sent, self._answered, self._wanted = what, number, None
