"""What each stage of a pipeline does with each micro-batch, in which order, and how long that takes. Pure.

Four stages, eight micro-batches; time goes to the right, a digit is a forward, its letter the backward (A of 0)::

        gpipe                        1f1b
    0 | 01234567      HGFEDCBA   0 | 0123   A4B5C6D7E F G H
    1 |  01234567    HGFEDCBA    1 |  012  A3B4C5D6E7F G H
    2 |   01234567  HGFEDCBA     2 |   01 A2B3C4D5E6F7G H
    3 |    01234567HGFEDCBA      3 |    0A1B2C3D4E5F6G7H

Both wait for (p - 1) / (m + p - 1) of the time where stages are even; 1f1b keeps the activations of at most p - s
micro-batches alive on stage s, gpipe those of all m.

GPipe: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2019. One forward,
one backward: Narayanan et al., PipeDream, 2019; with one update for all micro-batches: Fan et al., DAPPLE, 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A stage's work on one micro-batch: its forward, or its backward."""

    backward: bool
    micro: int


Order = tuple[tuple[Step, ...], ...]  # by stage


def gpipe(stages: int, micros: int) -> Order:
    """All forwards, then all backwards, the last first: what it has stored comes back first."""
    _check(stages, micros)
    forwards = [Step(False, i) for i in range(micros)]
    backwards = [Step(True, i) for i in reversed(range(micros))]
    return tuple((*forwards, *backwards) for _ in range(stages))


def one_forward_one_backward(stages: int, micros: int) -> Order:
    """As many forwards as fill the stages behind, then a backward after each forward."""
    _check(stages, micros)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micros)
        steps = [Step(False, i) for i in range(ahead)]
        for i in range(micros):
            if i + ahead < micros:
                steps.append(Step(False, i + ahead))
            steps.append(Step(True, i))
        orders.append(tuple(steps))
    return tuple(orders)


SCHEDULES: dict[str, Callable[[int, int], Order]] = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def order_of(schedule: str, stages: int, micros: int) -> Order:
    """The order of a schedule by its name.

    Raises:
        ValueError: the name is unknown, or a number is below 1.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, expected one of: {', '.join(sorted(SCHEDULES))}.")
    return SCHEDULES[schedule](stages, micros)


def live(order: Order) -> tuple[int, ...]:
    """By stage: of how many micro-batches at a time, at most, the backward is still to come after the forward."""
    found = []
    for steps in order:
        now = most = 0
        for step in steps:
            now += -1 if step.backward else 1
            most = max(most, now)
        found.append(most)
    return tuple(found)


@dataclass(frozen=True)
class Timed:
    """When a stage does a step, in seconds from the beginning."""

    stage: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of training, by time."""

    stages: int
    steps: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(timed.end for timed in self.steps)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        busy = sum(timed.end - timed.start for timed in self.steps)
        whole = self.seconds * self.stages
        return 1 - busy / whole if whole else 0.0


def simulate(
    order: Order, forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float] = ()
) -> Timeline:
    """Runs an order on devices that do one step at a time.

    Args:
        order: steps by stage.
        forward: seconds of a micro-batch by stage.
        backward: likewise.
        transfer: seconds that a micro-batch takes from stage s to s + 1, and its gradient back; it delays, but keeps
            no device busy.

    Raises:
        ValueError: the numbers do not fit the order, or steps of the order wait for each other.
    """
    stages = len(order)
    wires = list(transfer) or [0.0] * (stages - 1)
    if (len(forward), len(backward), len(wires)) != (stages, stages, stages - 1):
        raise ValueError(
            f"an order of {stages} stages needs {stages} forward and backward times and {stages - 1} transfers, got "
            f"{len(forward)}, {len(backward)} and {len(wires)}"
        )
    ended: dict[tuple[int, Step], float] = {}
    free, at = [0.0] * stages, [0] * stages
    found: list[Timed] = []
    while any(at[s] < len(order[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(order[s]):
                step = order[s][at[s]]
                ready = _ready(ended, s, step, stages, wires)
                if ready is None:
                    break
                start = max(free[s], ready)
                end = start + (backward if step.backward else forward)[s]
                found.append(Timed(s, step, start, end))
                ended[s, step] = free[s] = end
                at[s] += 1
                moved = True
        if not moved:
            waiting = {s: order[s][at[s]] for s in range(stages) if at[s] < len(order[s])}
            raise ValueError(f"the steps of this order wait for each other: by stage {waiting}")
    return Timeline(stages, tuple(sorted(found, key=lambda t: (t.start, t.stage))))


def _ready(
    ended: dict[tuple[int, Step], float], stage: int, step: Step, stages: int, wires: Sequence[float]
) -> float | None:
    """When what a step needs is there; None while something it needs has not been done."""
    needs = []
    if step.backward:
        needs.append(((stage, Step(False, step.micro)), 0.0))
        if stage < stages - 1:
            needs.append(((stage + 1, step), wires[stage]))
    elif stage > 0:
        needs.append(((stage - 1, step), wires[stage - 1]))
    if any(need not in ended for need, _ in needs):
        return None
    return max((ended[need] + wire for need, wire in needs), default=0.0)


def _check(stages: int, micros: int) -> None:
    if stages < 1 or micros < 1:
        raise ValueError(f"a pipeline needs at least one stage and one micro-batch, got {stages} and {micros}")
