"""Merges what the ranks print into one readable text. Pure: bytes and times in, text out.

Rank 0 passes through untouched, so its progress bar redraws as in a run without a launcher. Lines
of the other ranks carry their rank; a line that its rank redraws keeps its last state only:

    rank 0 writes  "epoch 1\\n"              ->  epoch 1
    rank 1 writes  "load\\n"                 ->  [1] load
    rank 1 writes  "10 %\\r20 %\\r30 %\\n"     ->  [1] 30 %

In a parameter-server job the chief is what rank 0 is here, and the others carry their task:
`[worker/1] load`.

A rank's line never lands inside one of rank 0's: it waits until that is complete, but no longer
than `HOLD_SECONDS`, after which rank 0's line is broken (a progress bar is never complete).
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Sequence

HOLD_SECONDS = 0.2
TAIL_LINES = 200
LONGEST = 1 << 16  # characters of a line

# TensorFlow 2.21 prints these whatever TF_CPP_MIN_LOG_LEVEL says: once, from rank 0, is enough.
START_UP_NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|I\d{4} \d\d:\d\d:\d{2,}\.\d+ +\d+ \S+\.cc:\d+\] "
)


def last_state(line: str) -> str:
    """What a terminal shows of a line with carriage returns and backspaces.

    >>> last_state("10 %" + chr(13) + "20 %")
    '20 %'
    """
    if "\r" not in line and "\b" not in line:
        return line
    shown: list[str] = []
    column = 0
    for character in line:
        if character == "\r":
            column = 0
        elif character == "\b":
            column = max(0, column - 1)
        else:
            shown[column : column + 1] = character
            column += 1
    return "".join(shown).rstrip()


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


class Lines:
    """Cuts a byte stream into lines, as far as they are complete.

    With a `limit` a line that is longer is cut: after what a terminal would have overwritten, else at its end so far.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._decoder = _decoder()
        self._limit = limit
        self._open = ""

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """The lines that `data` completes, without their ends; with `final` the open one too."""
        text = self._open + self._decoder.decode(data, final)
        *lines, self._open = text.split("\n")
        if self._limit is not None and len(self._open) > self._limit:
            kept = self._open.rfind("\r")
            if kept >= 0 and len(self._open) - kept <= self._limit:
                self._open = self._open[kept:]
            else:
                lines.append(self._open)
                self._open = ""
        if final and self._open:
            lines.append(self._open)
            self._open = ""
        return [last_state(line) for line in lines]


class Merger:
    """The state of one merged output of ranks or tasks, which `labels` names in their order.

    `feed` and `tick` return what to write now as pairs (stream, text), stream "out" or "err".
    """

    def __init__(self, labels: Sequence[str]):
        self._labels = labels
        ranks = len(labels)
        self._lines = {(rank, name): Lines(LONGEST) for rank in range(ranks) for name in ("out", "err")}
        self._raw = {name: _decoder() for name in ("out", "err")}
        self._mid_line = False
        self._held: list[tuple[str, str]] = []
        self._held_since = 0.0
        self.tails: dict[int, deque[str]] = {r: deque(maxlen=TAIL_LINES) for r in range(ranks)}

    def feed(self, rank: int, stream: str, data: bytes, now: float) -> list[tuple[str, str]]:
        """Take what `rank` has written to its `stream`; `now` in seconds of any steady clock."""
        lines = self._lines[rank, stream].feed(data)
        if stream == "err":
            self.tails[rank].extend(lines)
        if rank == 0:
            text = self._raw[stream].decode(data)
            if text:
                self._mid_line = not text.endswith("\n")
            out = [(stream, text)]
            return out if self._mid_line else out + self._release()
        return self._hold(rank, stream, lines, now)

    def tick(self, now: float) -> list[tuple[str, str]]:
        """Lines that have waited long enough for rank 0 to complete its own."""
        if not self._held or now < self._held_since + HOLD_SECONDS:
            return []
        broken = [("out", "\n")] if self._mid_line else []
        self._mid_line = False
        return broken + self._release()

    def waiting(self, now: float) -> float | None:
        """Seconds until `tick` has something to say, None if nothing waits."""
        return max(0.0, self._held_since + HOLD_SECONDS - now) if self._held else None

    def end(self) -> list[tuple[str, str]]:
        """Everything that is left, lines without an end included."""
        written = []
        for (rank, stream), lines in self._lines.items():
            rest = lines.feed(b"", final=True)
            if stream == "err":
                self.tails[rank].extend(rest)
            if rank > 0:
                written += self._hold(rank, stream, rest, 0.0)
        broken = [("out", "\n")] if self._mid_line and self._held else []
        return written + broken + self._release()

    def _hold(
        self, rank: int, stream: str, lines: Iterable[str], now: float
    ) -> list[tuple[str, str]]:
        start = f"[{self._labels[rank]}] "
        new = [(stream, f"{start}{line}\n") for line in lines if not START_UP_NOISE.match(line)]
        if new and not self._held:
            self._held_since = now
        self._held += new
        return [] if self._mid_line else self._release()

    def _release(self) -> list[tuple[str, str]]:
        released, self._held = self._held, []
        return released
