"""Predicts what a plan brings, by the formulas that stand in `outlook`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfdist.planner.layout import layout_of
from tfdist.planner.outlook import DataParallel, Held, Measured, Report, Setting, StageOutlook
from tfdist.planner.partition import Unit
from tfdist.planner.plan import Plan
from tfdist.planner.schedule import live, order_of
from tfdist.planner.timeline import simulate


def predict(
    units: Sequence[Unit],
    held: Sequence[Held],
    plan: Plan,
    setting: Setting,
    outputs: Sequence[int] = (),
    measured: Measured | None = None,
) -> Report:
    """What a plan brings.

    Args:
        units: the model's operations, with seconds and bytes of a micro-batch of `setting.samples`.
        held: of each of them.
        plan: for this model.
        setting: how it is carried out.
        outputs: operations whose results the loss takes, by position.
        measured: steps that have happened.

    Raises:
        ValueError: the plan is for another model or more devices, or the numbers do not fit each other.
    """
    if plan.devices > len(setting.devices) or len(held) != len(units):
        raise ValueError(
            f"a plan for {plan.devices} devices of a model of {len(units)} operations, got {len(setting.devices)} "
            f"devices and the weights of {len(held)} operations."
        )
    positions = plan.positions([unit.name for unit in units])
    devices = [stage.device for stage in plan.stages]
    layout = layout_of(positions, devices, [unit.needs for unit in units], outputs)
    order = order_of(setting.schedule, layout, setting.microbatches)
    arriving = _arriving(units, positions, outputs)
    stages = []
    for number, (mine, kept) in enumerate(zip(positions, live(order), strict=True)):
        again = setting.recompute and kept > 1
        made, came = sum(units[i].live_bytes for i in mine), sum(count for _, count in arriving[number])
        stages.append(
            StageOutlook(
                devices[number],
                tuple(units[i].name for i in mine),
                _joined([held[i] for i in mine]),
                kept,
                came if again else made,
                made if again else 0,
                sum(units[i].forward for i in mine),
                sum(units[i].backward for i in mine),
                again,
                arriving[number],
            )
        )
    wires = {
        (source, number): count / setting.bytes_per_second
        for number, stage in enumerate(stages)
        for source, count in stage.arriving
    }
    line = simulate(layout, order, [s.forward for s in stages], [s.back for s in stages], wires)
    return Report(plan.model, setting, tuple(stages), line, _data_parallel(units, held, setting), measured)


def _arriving(
    units: Sequence[Unit], positions: Sequence[Sequence[int]], outputs: Sequence[int]
) -> list[tuple[tuple[int, int], ...]]:
    """By stage: the stages before it that it takes from, and how many bytes. A tensor comes once to each stage."""
    home = {position: stage for stage, mine in enumerate(positions) for position in mine}
    found = []
    for stage, mine in enumerate(positions):
        wanted = {need for position in mine for need in units[position].needs}
        wanted |= set(outputs) if stage == len(positions) - 1 else set()
        come: dict[int, int] = {}
        for made in wanted:
            if home[made] != stage:
                come[home[made]] = come.get(home[made], 0) + units[made].out_bytes
        found.append(tuple(sorted(come.items())))
    return found


def _data_parallel(units: Sequence[Unit], held: Sequence[Held], setting: Setting) -> DataParallel:
    count = len(setting.devices)
    parts = setting.microbatches / count  # what a device computes, in micro-batches
    every = _joined(held)
    return DataParallel(
        parts * sum(unit.seconds for unit in units),
        2 * (count - 1) / count * every.gradients / setting.bytes_per_second,
        every.bytes + math.ceil(parts * sum(unit.live_bytes for unit in units)),
    )


def _joined(held: Sequence[Held]) -> Held:
    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in held)

    return Held(total("parameters"), total("weights"), total("gradients"), total("slots"))
