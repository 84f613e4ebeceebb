"""Which rank or task failed first, and how to say it. Pure.

When one rank fails, the others follow within moments: their collectives fail because the peer is
gone, or they are told to stop. So time alone does not find the culprit; what a rank reports about
itself comes first:

    told to stop  <  lost its peers  <  failed by itself  <  killed, or its host lost
                                                           (later in this list = more to blame)

The last of these are no rank's own doing, so nothing can have made them follow; and clocks of hosts differ.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from textwrap import shorten

from tfdist.launch.rundir import Failure

# Exceptions that say no more than that another rank is gone. Horovod's own class, and what its
# errors look like where Keras or TensorFlow has wrapped them; TensorFlow's own between tasks.
PEER_LOST_KINDS = ("HorovodInternalError", "RankEndedError", "UnavailableError")
HOST_LOST = "HostLost"  # kind of the failures of ranks whose host is gone
PEER_LOST_WORDS = (
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
)


MOST_LINES = 8
LINE_LENGTH = 320


def lost_peers(failure: Failure) -> bool:
    """True where the rank failed because another one did."""
    return any(kind in PEER_LOST_KINDS for kind in failure.kind) or any(
        word in failure.message for word in PEER_LOST_WORDS
    )


def culprit(failures: Iterable[Failure]) -> Failure | None:
    """The failure to blame, None where there is none."""

    def innocence(failure: Failure) -> tuple[bool, bool, bool, float, int]:
        from_outside = failure.signal == signal.SIGKILL or HOST_LOST in failure.kind
        return failure.told, lost_peers(failure), not from_outside, failure.at, failure.rank

    return min(failures, key=innocence, default=None)


def signal_name(number: int) -> str:
    """The name of a signal, as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def headline(failure: Failure) -> str:
    """One line: who failed, where and how."""
    who = f"{failure.who} on {failure.host} (pid {failure.pid})"
    if failure.signal:
        text = f"{who} was killed by signal {failure.signal} ({signal_name(failure.signal)})"
        if failure.signal == signal.SIGKILL:
            text += ", which the kernel also sends where memory runs out"
        return text + "."
    if failure.kind[:1] == ("SystemExit",):
        said = f": {failure.message}" if not failure.message.lstrip("-").isdigit() else ""
        return f"{who} left with exit code {failure.code}{said}."
    if failure.kind:
        message = failure.message.strip().splitlines() or [""]
        return f"{who} failed: {failure.kind[0]}: {message[0]}"
    return f"{who} ended with exit code {failure.code}, without a Python exception."


def report(failures: Iterable[Failure]) -> str:
    """Text for the end of a failed run: the others in a line each, then the culprit in full."""
    failures = sorted(failures, key=lambda failure: failure.rank)
    first = culprit(failures)
    if first is None:
        return ""
    kind = "tasks" if first.task else "ranks"
    shown = [f for f in failures if f is not first and not f.told]
    lines = [f"  {shorten(headline(f), LINE_LENGTH, placeholder=' ...')}" for f in shown[:MOST_LINES]]
    if len(shown) > MOST_LINES:
        lines.append(f"  ... and {len(shown) - MOST_LINES} more {kind}")
    if lines:
        lines = [f"these {kind} failed after {first.who}:", *lines, ""]
    lines.append(headline(first))
    if first.traceback and first.kind[0] != "SystemExit":
        lines += [f"Traceback of {first.who}:", first.traceback.rstrip()]
    return "\n".join(lines)
