"""How batches become calls under each consistency: what goes out when, and what is done with what comes back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import tensorflow as tf

from tfdist.data.share import cut_rows
from tfdist.data.shares import bounds
from tfdist.ps.consistency import Bounded, Consistency, LocalSGD, Sync
from tfdist.ps.pacing import Window, deal, most_steps
from tfdist.ps.rounds import LocalWork, ShareWork
from tfdist.ps.work import MOST_STEPS, Work, stackable

CALL_SECONDS = 0.5  # of a call, at which handing it out costs little


class Dealer(ABC):
    """Deals the batches of one epoch after the other; `session` sends calls and learns from their results.

    Attributes:
      steps: batches of a call.
    """

    work: type[Work] = Work
    by_rows = True  # whether embeddings can be held by rows

    def __init__(self, session: Any, consistency: Any, workers: int) -> None:
        self.session, self.consistency, self.workers = session, consistency, workers
        self.steps = 1

    @abstractmethod
    def take(self, batch: Any, rows: int) -> None:
        """A batch of `fit`; may wait."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when all batches have had their effect."""

    @abstractmethod
    def forget(self) -> None:
        """What was taken will not be sent: `fit` ended by an error."""


class Flow(Dealer):
    """Async and Bounded: each batch is an update, applied when it comes."""

    def __init__(self, session: Any, consistency: Any, workers: int) -> None:
        super().__init__(session, consistency, workers)
        staleness = consistency.staleness if isinstance(consistency, Bounded) else None
        self._most = most_steps(workers, staleness, MOST_STEPS)
        self._window = Window(session.limit, staleness)
        self._waiting: list[Any] = []
        self._timed: list[float] = []  # seconds of the first calls of one step

    def take(self, batch: Any, rows: int) -> None:
        if self._waiting and not stackable(self._waiting[0], batch):
            self._send()
        self._waiting.append(batch)
        if len(self._waiting) >= self.steps:
            self._send()

    def finish(self) -> None:
        if self._waiting:
            self._send()
        while len(self._window):
            self._hear(everything=True)

    def forget(self) -> None:
        self._waiting = []
        self._window.clear()

    def _send(self) -> None:
        batches, self._waiting = self._waiting, []
        while not self._window.admits(len(batches)):
            self._hear()
        began = time.monotonic()
        self._window.begin(self.session.send(batches), len(batches))
        if self.steps == 1 < self._most and len(self._timed) < 3:
            # Too short a call is mostly coordination: time the first few, the very first of which sets things up.
            self._hear(everything=True)
            self._timed.append(time.monotonic() - began)
            if len(self._timed) == 3:
                self.steps = max(1, min(self._most, round(CALL_SECONDS / min(self._timed))))

    def _hear(self, everything: bool = False) -> None:
        for call, result in self.session.results(everything):
            self._window.end(call)
            for late in result["facts"]:
                self.session.count(1, int(late))


class Shares(Dealer):
    """Sync: the joined batch is cut into shares; the first that come back make an update, the others are dropped."""

    work = ShareWork

    def __init__(self, session: Any, consistency: Any, workers: int) -> None:
        super().__init__(session, consistency, workers)
        self._pending: deque[tuple[Any, int]] = deque()
        self._out: set[int] = set()  # calls under way

    def take(self, batch: Any, rows: int) -> None:
        for worker in range(self.workers):
            low, high = bounds(rows, worker, self.workers)
            if high > low:
                self._pending.append((cut_rows(batch, low, high), high - low))
        if not self.consistency.backup_workers:
            self._step(len(self._pending))
            return
        while len(self._pending) >= (free := self.workers - len(self._out)):
            self._step(free)

    def finish(self) -> None:
        while self._pending:
            self._step(min(len(self._pending), self.workers - len(self._out)))
        while self._out:
            self._hear()

    def forget(self) -> None:
        self._pending.clear()
        self._out.clear()

    def _step(self, count: int) -> None:
        shares = [self._pending.popleft() for _ in range(count)]
        needed = min(count, self.workers - self.consistency.backup_workers)
        # The samples that will count; exact where all do.
        total = sum(rows for _, rows in shares) * needed / count
        mine = {self.session.send([share], rows / total) for share, rows in shares}
        self._out |= mine
        accepted: dict[int, float] = {}
        while len(accepted) < needed:
            for call, result in self._hear(mine, needed - len(accepted)):
                accepted[call] = float(result["facts"][0])
        weight = sum(accepted.values())
        self.session.combine(list(accepted), [w / weight if weight else 0.0 for w in accepted.values()])
        self.session.count(1, 0)

    def _hear(self, wanted: set[int] = frozenset(), most: int = 0) -> list[tuple[int, Any]]:
        """Up to `most` results of `wanted` calls; all others that have come are too late."""
        found = self.session.results()
        self._out -= {call for call, _ in found}
        inside = [one for one in found if one[0] in wanted][:most]
        self.session.dropped += len(found) - len(inside)
        return inside


class Copies(Dealer):
    """LocalSGD: each worker trains a copy for a few batches; then the copies are averaged."""

    work = LocalWork
    by_rows = False

    def __init__(self, session: Any, consistency: Any, workers: int) -> None:
        super().__init__(session, consistency, workers)
        self.steps = consistency.steps
        self._pending: list[tuple[Any, int]] = []

    def take(self, batch: Any, rows: int) -> None:
        self._pending.append((batch, rows))
        if len(self._pending) >= self.workers * self.steps:
            self.finish()

    def finish(self) -> None:
        pending, self._pending = self._pending, []
        kinds: list[int] = []
        for i, (batch, _) in enumerate(pending):
            kinds.append(kinds[-1] if i and stackable(pending[i - 1][0], batch) else i)
        for calls in deal(kinds, self.workers, self.steps):
            samples = {}
            for numbers in calls:
                samples[self.session.send([pending[n][0] for n in numbers])] = sum(pending[n][1] for n in numbers)
            while self.session.results(everything=True):
                pass
            total = sum(samples.values())
            self.session.combine(list(samples), [count / total for count in samples.values()])
            self.session.count(max(len(numbers) for numbers in calls), 0)

    def forget(self) -> None:
        self._pending = []


def dealer_of(consistency: Consistency) -> type[Dealer]:
    """Which one deals under a consistency."""
    return Shares if isinstance(consistency, Sync) else Copies if isinstance(consistency, LocalSGD) else Flow


def plain(value: Any) -> Any:
    """A part of a batch; Keras wraps a missing one."""
    return None if isinstance(value, tf.experimental.Optional) else value
