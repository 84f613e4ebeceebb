"""Elastic jobs: who takes part in the next round, and whether there is one. Pure.

A job goes through rounds. Within one the ranks are fixed; when a rank dies, a host is lost, goes or
comes, all ranks end and the next round goes on from the last checkpoint with those that are there:

    round 0   a:2 b:2                     4 ranks   b is lost
    round 1   a:2                         2 ranks   c comes: the ranks write a checkpoint and leave
    round 2   a:2 c:2                     4 ranks   done
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfdist.launch import verdict
from tfdist.launch.hosts import Host, total_slots
from tfdist.launch.outcome import Outcome
from tfdist.launch.rundir import Failure
from tfdist.launch.verdict import HOST_LOST

REST_SECONDS = 60.0  # for which a host that was lost gets no rank
SHORT_SECONDS = 30.0  # a round that ended before has done nothing
SHORT_ROUNDS = 3  # so many in a row are the end
TEMPORARY = 75  # EX_TEMPFAIL: the ranks have left with a checkpoint


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Attributes:
        min_np, max_np: fewest and most ranks of a round.
        resets: most rounds after the first, None for any number.
        wait_seconds: for hosts with at least `min_np` slots.

    Raises:
        ValueError: numbers that contradict each other.
    """

    min_np: int
    max_np: int
    resets: int | None = None
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_np <= self.max_np:
            raise ValueError(
                f"--min-np is {self.min_np} and --max-np {self.max_np}, expected 1 <= min-np <= max-np."
            )
        if self.resets is not None and self.resets < 0:
            raise ValueError(f"--reset-limit is {self.resets}, expected 0 or more.")


@dataclass(frozen=True)
class Next:
    """What comes after a round.

    Attributes:
        again: whether there is another one.
        why: for the user: what has happened.
        lost: names of hosts that are to rest.
    """

    again: bool
    why: str
    lost: tuple[str, ...] = ()


def team(hosts: Sequence[Host], resting: Sequence[str], limits: Limits) -> tuple[Host, ...]:
    """The hosts of a round with as many slots as it uses; () where there are too few.

    Args:
        hosts: those that are offered, in order.
        resting: names of those that are to get no rank.
        limits: of the job.
    """
    found: list[Host] = []
    left = limits.max_np
    for host in hosts:
        if host.name not in resting and left > 0:
            found.append(replace(host, slots=min(host.slots, left)))
            left -= found[-1].slots
    return tuple(found) if limits.max_np - left >= limits.min_np else ()


def changed(now: Sequence[Host], then: Sequence[Host]) -> bool:
    """Whether a round on `now` should end for one on `then`: hosts it uses are gone, or there is more room.

    The order alone is no reason, nor are other hosts with no more slots.
    """
    offered = {host.name: host.slots for host in then}
    gone = any(offered.get(host.name, 0) < host.slots for host in now)
    return bool(then) and (gone or total_slots(then) > total_slots(now))


def judge(outcome: Outcome, asked: bool, seconds: float, short: int, resets: int, limits: Limits) -> Next:
    """Whether a round that has ended is followed by another one.

    Args:
        outcome: how it ended.
        asked: the ranks were asked to leave, because hosts have changed.
        seconds: it took.
        short: how many rounds before, in a row, took less than `SHORT_SECONDS`.
        resets: rounds that began after the first.
        limits: of the job.
    """
    first = outcome.culprit
    lost = tuple(sorted({f.host for f in outcome.failures if HOST_LOST in f.kind}))
    if outcome.code == 0:
        return Next(False, "")
    if outcome.interrupted:
        return Next(False, "")
    if asked:
        return Next(True, "hosts have changed", lost) if _within(resets, limits) else _limit(resets)
    if first is None or not (heals(first) or outcome.code == TEMPORARY):
        return Next(False, "")
    why = verdict.headline(first).removesuffix(".")
    if outcome.code == TEMPORARY:
        why = f"{first.who} was told to leave"
    if seconds < SHORT_SECONDS and short + 1 >= SHORT_ROUNDS:
        return Next(False, f"{short + 1} rounds in a row ended within {SHORT_SECONDS:g} s")
    return Next(True, why, lost) if _within(resets, limits) else _limit(resets)


def heals(failure: Failure) -> bool:
    """Whether a new round may help: the rank was killed, lost its host or its peers. An exception is the program's."""
    return bool(failure.signal) or HOST_LOST in failure.kind or verdict.lost_peers(failure)


def _within(resets: int, limits: Limits) -> bool:
    return limits.resets is None or resets < limits.resets


def _limit(resets: int) -> Next:
    return Next(False, f"{resets} rounds were added, and --reset-limit allows no more")
