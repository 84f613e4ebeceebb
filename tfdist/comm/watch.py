"""The roll call: an operation that some ranks never join ends with an error that names them.

Whoever runs a collective says so:

    with watch.waiting("evaluate 'sequential', step 3"):    # all ranks must come here
        ...
    with watch.busy("save model.keras"):                    # the others have to wait for this one
        ...

That sets an attribute and sends nothing. A thread in each process (`tfdist.comm.rollcall`) looks once a second;
when a rank has waited longer than the deadline, rank 0 asks what every rank is doing and, where the operation can
no longer complete (`tfdist.comm.verdict`), tells all ranks to stop. The deadline is 60 s, or the environment's
TFDIST_DEADLINE, or `set_deadline`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from tfdist.comm.verdict import State, ended, named

DEFAULT_DEADLINE = 60.0


class RankEndedError(RuntimeError):
    """Another rank ended, or the connection to it broke, while this one waited for it: it says who, not why."""


class Group(Protocol):
    """The part of a collective that the roll call needs."""

    rank: int
    size: int
    local_size: int
    hosts: tuple[str, ...]

    def abort(self) -> None: ...

    def lost(self, error: BaseException) -> bool:
        """Whether the error says that a collective broke off because a rank left or aborted."""
        ...


class Region:
    """A stretch of code in which this rank waits for the others, or they for it. A context manager.

    `unguarded`: a graph is in it; nothing turns the raw error of its collective into the roll call's message.
    """

    def __init__(self, board: Board | None, what: str, busy: bool, unguarded: bool = False) -> None:
        self.board, self.what, self.busy, self.unguarded = board, what, busy, unguarded

    def __enter__(self) -> None:
        if self.board is not None:
            self.board.enter(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        board = self.board
        if board is None:
            return
        try:
            if error is not None and not self.busy:
                told = board.explain(error)
                if told is not None:
                    raise told from error
        finally:
            board.leave(self)


class Board:
    """What this process is doing and what became of the others; read and written by two threads."""

    def __init__(self, group: Group, deadline: float) -> None:
        self.group, self.deadline = group, deadline
        self.verdict: str | None = None  # why all have to stop; final
        self.gone: dict[int, str] = {}  # ranks that ended, and their exception or ""
        self.news = threading.Condition()
        self._regions: list[Region] = []
        self._changed = time.monotonic()

    def enter(self, region: Region) -> None:
        if self.verdict is not None and not region.busy:
            raise RuntimeError(self.verdict)
        self._regions.append(region)
        self._changed = time.monotonic()

    def leave(self, region: Region) -> None:
        with self.news:
            if region in self._regions:
                self._regions.remove(region)
            self._changed = time.monotonic()
            self.news.notify_all()

    def state(self) -> State:
        regions = list(self._regions)
        busy = bool(regions) and regions[-1].busy
        return State(tuple(r.what for r in regions), busy, time.monotonic() - self._changed)

    def innermost(self) -> Region | None:
        """The region this process waits in now, or None."""
        regions = list(self._regions)
        return regions[-1] if regions and not regions[-1].busy else None

    def inside(self, region: Region) -> bool:
        return region in self._regions

    def tell(self, verdict: str | None = None, gone: tuple[int, str] | None = None) -> None:
        """Stores what rank 0 (or a broken connection) told; the first verdict stays."""
        with self.news:
            if verdict is not None and self.verdict is None:
                self.verdict = verdict
            if gone is not None:
                self.gone.setdefault(*gone)
            self.news.notify_all()

    def explain(self, error: BaseException) -> RuntimeError | None:
        """What to raise in place of a collective's raw error; None for errors that are no such thing."""
        if not self.group.lost(error):
            return None
        with self.news:  # the connection between the ranks breaks a moment before its reason arrives
            self.news.wait_for(lambda: self.verdict is not None or self.gone, timeout=3.0)
        return RuntimeError(self.verdict) if self.verdict else RankEndedError(self.farewell())

    def farewell(self) -> str:
        """The message for a rank that waits for ranks that ended."""
        what, group = self.state().path[:1], self.group
        place = what[0] if what else "a collective operation"
        if self.gone:
            rank = next(iter(self.gone))
            return ended(rank, self.gone[rank], group.rank, group.hosts, place)
        return (
            f"the connection between the ranks broke while {named([group.rank], group.hosts)} waited in {place}: "
            "another rank ended or the network failed; the first traceback in the output tells more"
        )


_board: Board | None = None


def waiting(what: str) -> Region:
    """Guards code that completes only when every rank runs it; `what` names it, the same on every rank.

    Regions nest. The region raises RuntimeError, in place of the raw error, when the operation was stopped,
    and RankEndedError, which is one, when a rank ended; at its start when the first happened before.
    """
    return Region(_board, what, busy=False)


def busy(what: str) -> Region:
    """Guards work of this rank during which the others wait as long as it takes."""
    return Region(_board, what, busy=True)


class GraphRegion:
    """A region that a running graph enters and leaves, in TensorFlow's threads.

    Where the graph runs in a region already (a step of `fit`), that one says enough.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._entered: list[Region] = []

    def enter(self) -> None:
        if _board is not None and not _board.state().path:
            region = Region(_board, self._what, busy=False, unguarded=True)
            _board.enter(region)
            self._entered.append(region)

    def leave(self) -> None:
        if _board is not None and self._entered:
            _board.leave(self._entered.pop())


def in_graph(what: str) -> GraphRegion:
    """A guard for an operation inside a `tf.function` that nothing else guards."""
    return GraphRegion(what)


def set_deadline(seconds: float) -> None:
    """How long this rank waits before it asks who is missing; `math.inf` for ever.

    Raises:
      ValueError: not a positive number.
    """
    os.environ["TFDIST_DEADLINE"] = str(checked_seconds(seconds, "set_deadline"))
    if _board is not None:
        _board.deadline = float(seconds)


def deadline() -> float:
    """Seconds, from `set_deadline`, TFDIST_DEADLINE or the default."""
    text = os.environ.get("TFDIST_DEADLINE")
    return DEFAULT_DEADLINE if not text else checked_seconds(text, "TFDIST_DEADLINE")


def start(group: Any) -> None:
    """Connects this process to the roll call of its group; all ranks call it."""
    global _board
    from tfdist.comm import rollcall

    board = Board(group, deadline())
    rollcall.start(board)
    _board = board


def checked_seconds(value: float | str, origin: str) -> float:
    """A number of seconds above 0, perhaps inf; ValueError, with where it came from, for anything else."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{origin} is {value!r}; it takes a positive number of seconds, or inf")
    return seconds
