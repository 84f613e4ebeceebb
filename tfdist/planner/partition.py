"""Where a model is cut into stages: costs in, the best cut out. Pure.

A model is its operations in an order in which each comes after what it needs. A stage is a stretch of that order, so a
cut is a place between two operations, and what crosses it is every tensor that was made before and is needed after::

    unit      0      1      2   |  3      4
              a ---> b ---> c --|> d ---> e        crosses: c, and a (a skip)
              '-----------------|---------^

The slowest stage sets the pace of a pipeline, so its time is made as small as it can be, over all cuts (dynamic
programming over the order; Narayanan et al., PipeDream, 2019, without replicated stages). Of equally good cuts that
is taken over which the fewest bytes go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BALANCES = ("time", "memory", "parameters")  # what the stages of a cut that is chosen can be even by
FORTH_AND_BACK = 2  # a tensor goes over the cut, and its gradient comes back


@dataclass(frozen=True)
class Unit:
    """An operation of the model, as far as the cut depends on it.

    Attributes:
        name: of its layer or operation.
        forward: seconds of one micro-batch.
        backward: likewise.
        fixed_bytes: weights, gradients and slots.
        live_bytes: activations that one micro-batch keeps until its backward.
        needs: positions of the units whose outputs it takes.
        out_bytes: its own output, of one micro-batch.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    fixed_bytes: int = 0
    live_bytes: int = 0
    needs: tuple[int, ...] = ()
    out_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Cut:
    """Stages as stretches of the units: stage s has units `bounds[s]` to `bounds[s + 1]`.

    Attributes:
        bounds: as many as stages, and one.
        seconds: of each stage for one micro-batch, what arrives over cuts included.
        stage_bytes: memory of each stage.
        arriving: bytes that each stage gets from stages before it, of one micro-batch.
    """

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    stage_bytes: tuple[int, ...]
    arriving: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Units of each stage."""
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True)
class Costs:
    """What a stage costs, for all stretches of the units at once.

    Args:
        units: the model.
        bytes_per_second: over a cut; infinite where transfers do not count.
    """

    units: Sequence[Unit]
    bytes_per_second: float = math.inf
    arriving: np.ndarray = field(init=False)  # [i, j]: bytes that come to a stage of units i to j
    seconds: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        check(self.units)
        count = len(self.units)
        arriving = np.zeros((count + 1, count + 1))
        for made, unit in enumerate(self.units):
            users = [i for i, other in enumerate(self.units) if made in other.needs]
            # It comes once to a stage that begins after it, where the first user from there on is in it.
            for start in range(made + 1, max(users, default=0) + 1):
                first = next(user for user in users if user >= start)
                arriving[start, first + 1 :] += unit.out_bytes
        summed = np.concatenate([[0.0], np.cumsum([unit.seconds for unit in self.units])])
        compute = summed[None, :] - summed[:, None]
        object.__setattr__(self, "arriving", arriving)
        object.__setattr__(self, "seconds", compute + FORTH_AND_BACK * arriving / self.bytes_per_second)

    def stage_bytes(self, live: int) -> np.ndarray:
        """[i, j]: memory of a stage of units i to j that keeps the activations of `live` micro-batches."""
        each = [unit.fixed_bytes + live * unit.live_bytes for unit in self.units]
        summed = np.concatenate([[0], np.cumsum(each, dtype=np.int64)])
        found: np.ndarray = summed[None, :] - summed[:, None]
        return found


def best_cut(
    units: Sequence[Unit],
    stages: int,
    live: Sequence[int] = (),
    memory: float = math.inf,
    bytes_per_second: float = math.inf,
    by: str = "seconds",
) -> Cut:
    """The cut whose slowest stage is fastest, or whose largest is smallest.

    Args:
        units: the model, in order.
        stages: how many; each gets one unit at least.
        live: by stage, of how many micro-batches activations are kept (`schedule.live`); one each if not given.
        memory: bytes that a stage may take.
        bytes_per_second: over a cut, each way.
        by: "seconds", or "memory".

    Raises:
        ValueError: there are more stages than units, or no cut keeps within `memory`.
    """
    count = len(units)
    if not 1 <= stages <= count:
        raise ValueError(f"a model of {count} operations cannot be cut into {stages} stages: each needs one at least.")
    kept = tuple(live) or (1,) * stages
    if len(kept) != stages:
        raise ValueError(f"live has {len(kept)} entries for {stages} stages.")
    costs = Costs(units, bytes_per_second)
    takes = [costs.stage_bytes(each) for each in kept]
    allowed = [take <= memory for take in takes]
    counted = [np.where(ok, each, math.inf) for ok, each in zip(allowed, _counted(costs, takes, by), strict=True)]
    pace, _ = _paths(counted, np.maximum)
    if math.isinf(pace):
        least, _ = _paths(takes, np.maximum)
        raise ValueError(
            f"no cut into {stages} stages keeps within {memory:,.0f} bytes a device: the best one needs "
            f"{least:,.0f}. Take more devices or smaller micro-batches."
        )
    # Of the cuts at that pace, the one with the fewest bytes over the cuts. The tolerance is that of sums in floats.
    _, bounds = _paths([np.where(each <= pace * (1 + 1e-9), costs.arriving, math.inf) for each in counted], np.add)
    return _cut_at(costs, bounds, kept)


def _counted(costs: Costs, takes: Sequence[np.ndarray], by: str) -> Sequence[np.ndarray]:
    """What is to be even."""
    if by == "memory":
        return takes
    if by == "seconds":
        return [costs.seconds] * len(takes)
    raise ValueError(f"by is {by!r}, expected 'seconds' or 'memory'.")


def describe(
    units: Sequence[Unit], bounds: Sequence[int], live: Sequence[int] = (), bytes_per_second: float = math.inf
) -> Cut:
    """A cut that was made otherwise, with what it costs.

    Raises:
        ValueError: the bounds do not cover the units, or a stage is empty.
    """
    ends = tuple(int(b) for b in bounds)
    if ends[:1] != (0,) or ends[-1] != len(units) or any(a >= b for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"bounds are {ends}, expected rising numbers from 0 to {len(units)}, the model's operations.")
    return _cut_at(Costs(units, bytes_per_second), ends, tuple(live) or (1,) * (len(ends) - 1))


def _cut_at(costs: Costs, bounds: tuple[int, ...], kept: Sequence[int]) -> Cut:
    spans = list(zip(bounds, bounds[1:], strict=False))
    return Cut(
        bounds,
        tuple(float(costs.seconds[span]) for span in spans),
        tuple(int(costs.stage_bytes(each)[span]) for each, span in zip(kept, spans, strict=True)),
        tuple(int(costs.arriving[span]) for span in spans),
    )


def bounds_of(counts: Sequence[int]) -> tuple[int, ...]:
    """The bounds of stages of so many units each.

    >>> bounds_of([2, 4])
    (0, 2, 6)
    """
    return tuple(int(end) for end in np.cumsum([0, *counts]))


def check(units: Sequence[Unit]) -> None:
    """Raises ValueError where a unit comes before what it needs, or costs less than nothing."""
    for position, unit in enumerate(units):
        if any(not 0 <= need < position for need in unit.needs):
            raise ValueError(f"unit {position} ({unit.name}) needs {unit.needs}, which must all come before it.")
        if min(unit.forward, unit.backward, unit.fixed_bytes, unit.live_bytes, unit.out_bytes) < 0:
            raise ValueError(f"unit {position} ({unit.name}) has a negative cost: {unit}")


def _paths(costs: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least cost of cutting everything into stages, stage s of units i to j costing costs[s][i, j]; its bounds.

    `join` makes one cost of those of two parts: their maximum, or their sum.
    """
    ends = costs[0].shape[0]
    stretch = np.triu(np.ones((ends, ends), bool), 1)  # at least one unit
    best, came = np.where(stretch[0], costs[0][0], math.inf), []
    for cost in costs[1:]:
        through = join(best[:, None], np.where(stretch, cost, math.inf))  # [i, j]: up to i before, i to j now
        came.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    bounds = [ends - 1]
    for row in reversed(came):
        bounds.append(int(row[bounds[-1]]))
    return float(best[-1]), (0, *reversed(bounds))
