"""How long an order of steps takes on devices that do one step at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.planner.layout import Layout
from tfdist.planner.schedule import Order, Step, before


@dataclass(frozen=True)
class Timed:
    """When a step is done, in seconds from the beginning."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step of training, by time.

    Attributes:
        lanes: how many devices there are.
        steps: in order of their starts.
    """

    lanes: int
    steps: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(timed.end for timed in self.steps)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait."""
        busy = sum(timed.end - timed.start for timed in self.steps)
        whole = self.seconds * self.lanes
        return 1 - busy / whole if whole else 0.0


def simulate(
    layout: Layout,
    order: Order,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Mapping[tuple[int, int], float] | None = None,
) -> Timeline:
    """Runs an order.

    Args:
        layout: the stages.
        order: steps by lane.
        forward: seconds of a micro-batch by stage.
        backward: likewise.
        transfer: seconds that a micro-batch takes from one stage to another, and its gradient back, by (from, to);
            none where nothing is said. It delays, but keeps no device busy.

    Raises:
        ValueError: the numbers do not fit the order, or steps of the order wait for each other.
    """
    wires = transfer or {}
    if (len(forward), len(backward), len(order)) != (layout.stages, layout.stages, layout.width):
        raise ValueError(
            f"{layout.stages} stages on {layout.width} devices need {layout.stages} forward and backward times and "
            f"{layout.width} lanes of steps, got {len(forward)}, {len(backward)} and {len(order)}"
        )
    ended: dict[Step, float] = {}
    free, at = [0.0] * len(order), [0] * len(order)
    found: list[Timed] = []
    while any(at[lane] < len(steps) for lane, steps in enumerate(order)):
        moved = False
        for lane, steps in enumerate(order):
            while at[lane] < len(steps):
                step = steps[at[lane]]
                needs = before(layout, step)
                if any(need not in ended for need in needs):
                    break
                ready = max((ended[need] + wires.get(_wire(need, step), 0.0) for need in needs), default=0.0)
                start = max(free[lane], ready)
                end = start + (backward if step.backward else forward)[step.stage]
                found.append(Timed(step, start, end))
                ended[step] = free[lane] = end
                at[lane] += 1
                moved = True
        if not moved:
            waiting = [steps[at[lane]] for lane, steps in enumerate(order) if at[lane] < len(steps)]
            raise ValueError(f"the steps of this order wait for each other: {waiting}")
    return Timeline(len(order), tuple(sorted(found, key=lambda t: (t.start, t.step.stage, t.step.micro))))


def _wire(before: Step, after: Step) -> tuple[int, int]:
    """The cut between two steps, as forwards cross it."""
    return (after.stage, before.stage) if after.backward else (before.stage, after.stage)
