"""Decides from what every rank is doing whether an operation can still complete. Pure: plain values in, text out.

Rank 0 waits past its deadline; what rank 1 does meanwhile decides:

    rank 0   ...fit step 9 | evaluate 'm' -------------- waits ------------>|  deadline
    rank 1   ...fit step 9 | user code, or waits in something else -------->|  -> abort, naming rank 1
    rank 1   ...fit step 9 | busy: save 'm.keras' ------------------------->|  -> go on waiting
    rank 1   ...fit step 9 | evaluate 'm' (slow) -------------------------->|  -> go on waiting
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """What one rank does.

    Attributes:
      path: names of the guarded regions it is in, outermost first; empty in user code.
      busy: the innermost region is work of its own that the others have to wait for.
      seconds: since it entered the innermost region, or since it left the last one.
    """

    path: tuple[str, ...]
    busy: bool
    seconds: float


def judge(reporter: int, states: Mapping[int, State | None], hosts: Sequence[str], deadline: float) -> str | None:
    """The message with which all ranks have to stop, or None while the operation may still complete.

    Args:
      reporter: the rank that has waited longer than `deadline` seconds.
      states: by rank; None for a rank that does not answer.
      hosts: by rank.
    """
    waiting = states[reporter]
    if waiting is None or waiting.busy or not waiting.path:
        return None  # it went on in the meantime
    missing = []
    for rank, state in sorted(states.items()):
        if state is not None and (state.busy or compatible(waiting.path, state.path)):
            if state.busy:
                return None
        elif state is not None and state.seconds < 0.9 * deadline:
            return None  # it was elsewhere until a moment ago and may be on its way
        else:
            missing.append(rank)
    if not missing:
        return None
    joined = [r for r in sorted(states) if r not in missing]
    outer = waiting.path[0]
    doing = "; ".join(f"rank {r} {_doing(states[r], outer)}" for r in missing)
    return (
        f"{_shown(waiting.path, outer, states, missing)} was joined by {named(joined, hosts)} but not by "
        f"{named(missing, hosts)} within {deadline:g} s: {doing}. Every rank must call it; "
        "set TFDIST_DEADLINE (seconds) to wait longer"
    )


def compatible(one: Sequence[str], other: Sequence[str]) -> bool:
    """True when both are in the same region, one perhaps further inside: it may be computing on its way there."""
    shorter = min(len(one), len(other))
    return shorter > 0 and tuple(one[:shorter]) == tuple(other[:shorter])


def ended(gone: int, why: str, rank: int, hosts: Sequence[str], what: str) -> str:
    """The message for `rank`, which waited in `what` while rank `gone` left (`why`: "" or its exception)."""
    where = f"while {named([rank], hosts)} waited in {what}"
    if why:
        return f"{named([gone], hosts)} ended with {why.rstrip(': ')} {where}; its own traceback tells why"
    return (
        f"{named([gone], hosts)} ended {where}; if it was not killed, it came to its end without that operation, which "
        "every rank must call"
    )


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks with their hosts: "rank 1 (b)", "ranks 1 (b), 2 (c)"."""
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(f"{r} ({hosts[r]})" for r in ranks)


def _doing(state: State | None, outer: str) -> str:
    if state is None:
        return "ended or does not answer"
    if not state.path:
        return "is in user code"
    return "waits in " + (state.path[0] if state.path[0] != outer else " > ".join(state.path))


def _shown(path: Sequence[str], outer: str, states: Mapping[int, State | None], missing: Sequence[int]) -> str:
    # The outermost name says enough unless the ranks differ only further inside.
    inside = any((s := states[r]) is not None and s.path[:1] == (outer,) for r in missing)
    return " > ".join(path) if inside else outer
