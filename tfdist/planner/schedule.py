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

from collections.abc import Callable
from dataclasses import dataclass

from tfdist.planner.layout import Layout


@dataclass(frozen=True)
class Step:
    """A stage's work on one micro-batch: its forward, or its backward."""

    stage: int
    backward: bool
    micro: int


Order = tuple[tuple[Step, ...], ...]  # by lane


def gpipe(layout: Layout, micros: int) -> Order:
    """All forwards, then all backwards, the last first: what it has stored comes back first."""
    forwards = _walk(layout, micros, lambda done, step: not step.backward)
    return tuple((*lane, *(Step(s.stage, True, s.micro) for s in reversed(lane))) for lane in forwards)


def one_forward_one_backward(layout: Layout, micros: int) -> Order:
    """As many forwards as fill the stages behind, then a backward after each forward.

    Of two backwards, or two forwards, that a device could do next, it does that of the earlier micro-batch.
    """
    ahead = layout.depths
    return _walk(layout, micros, lambda done, step: step.backward or step.micro < done[step.stage] + ahead[step.stage])


SCHEDULES: dict[str, Callable[[Layout, int], Order]] = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def order_of(schedule: str, layout: Layout, micros: int) -> Order:
    """The order of a schedule by its name.

    Raises:
        ValueError: the name is unknown, or there is no micro-batch.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}, expected one of: {', '.join(sorted(SCHEDULES))}.")
    if micros < 1:
        raise ValueError(f"a pipeline needs at least one micro-batch, got {micros}")
    return SCHEDULES[schedule](layout, micros)


def live(order: Order) -> tuple[int, ...]:
    """By stage: of how many micro-batches at a time, at most, the backward is still to come after the forward."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for step in (step for lane in order for step in lane):
        now[step.stage] = now.get(step.stage, 0) + (-1 if step.backward else 1)
        most[step.stage] = max(most.get(step.stage, 0), now[step.stage])
    return tuple(most[stage] for stage in sorted(most))


def before(layout: Layout, step: Step) -> tuple[Step, ...]:
    """The steps whose results a step takes."""
    if not step.backward:
        return tuple(Step(need, False, step.micro) for need in layout.needs[step.stage])
    users = (Step(user, True, step.micro) for user in layout.users[step.stage])
    return (Step(step.stage, False, step.micro), *users)


def _walk(layout: Layout, micros: int, may: Callable[[list[int], Step], bool]) -> Order:
    """Every lane does, each moment, the best step that is ready and that `may(backwards done by stage, step)` be done.

    All steps take one moment. It cannot get stuck: of the earliest micro-batch that is not through some step is ready,
    and is at most one ahead of the backwards that were done.
    """
    order: list[list[Step]] = [[] for _ in range(layout.width)]
    done: set[Step] = set()
    counts = {backward: [0] * layout.stages for backward in (False, True)}
    while True:
        chosen = []
        for lane in range(layout.width):
            ready = []
            for stage in (s for s in range(layout.stages) if layout.lanes[s] == lane):
                for backward in (True, False):
                    step = Step(stage, backward, counts[backward][stage])
                    if step.micro < micros and may(counts[True], step) and done.issuperset(before(layout, step)):
                        ready.append(step)
            if ready:
                chosen.append(min(ready, key=_urgency))
        if not chosen:
            return tuple(map(tuple, order))
        for step in chosen:
            done.add(step)
            counts[step.backward][step.stage] += 1
            order[layout.lanes[step.stage]].append(step)


def _urgency(step: Step) -> tuple[bool, int, int]:
    return not step.backward, step.micro, -step.stage if step.backward else step.stage
