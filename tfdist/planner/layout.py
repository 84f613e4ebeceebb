"""Stages and how they hang together: which device computes each, and what each waits for. Pure.

A stage is some of a model's operations on one device. Where a model is cut in a row, each device has one stage. Where
its branches are on different devices, a device can have several, so that branches run side by side::

          .-> b1 -> b2 -.               on device 1:          b1 b2
    stem -|              |-> join       on device 0:    stem  a1 a2  join
          '-> a1 -> a2 -'
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """By stage: its lane (the number of its device), and the stages whose outputs it takes, all before it."""

    lanes: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for stage, needs in enumerate(self.needs):
            if any(not 0 <= need < stage for need in needs):
                raise ValueError(f"stage {stage} needs {needs}, expected stages before it.")

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.lanes)

    @property
    def width(self) -> int:
        """How many lanes there are."""
        return max(self.lanes) + 1

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the stages that take its outputs."""
        return tuple(
            tuple(user for user, needs in enumerate(self.needs) if stage in needs) for stage in range(self.stages)
        )

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """By stage: how many stages the longest way from it to the end has, itself counted."""
        depths = [1] * self.stages
        for stage in reversed(range(self.stages)):
            depths[stage] += max((depths[user] for user in self.users[stage]), default=0)
        return tuple(depths)


def chain(stages: int) -> Layout:
    """One stage a device, each fed by the one before."""
    return Layout(tuple(range(stages)), tuple(((s - 1,) if s else ()) for s in range(stages)))


def grouped(devices: Sequence[int], needs: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Stages for operations whose devices are given, as few as let what can run side by side do so.

    Operations of a device are a stage where they wait for the same operations of other devices, and the same operations
    of other devices wait for them. No two stages made like that can wait for each other.

    Args:
        devices: by operation, in an order in which each comes after what it needs.
        needs: by operation: positions of the operations it takes from.

    Returns:
        positions of the operations of each stage, in an order in which each stage comes after what it needs.
    """
    count = len(devices)
    before, after = [0] * count, [0] * count  # sets, as bits
    for i in range(count):
        for need in needs[i]:
            before[i] |= before[need] | 1 << need
    for i in reversed(range(count)):
        for need in needs[i]:
            after[need] |= after[i] | 1 << i
    others = [sum(1 << i for i in range(count) if devices[i] != device) for device in range(max(devices) + 1)]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for i, device in enumerate(devices):
        groups.setdefault((device, before[i] & others[device], after[i] & others[device]), []).append(i)
    home = {i: key for key, group in groups.items() for i in group}
    waits = {key: {home[n] for i in group for n in needs[i]} - {key} for key, group in groups.items()}
    ordered: list[tuple[int, ...]] = []
    while waits:
        # Groups are known in the order of their first operations.
        key = next(key for key, needed in waits.items() if not needed & waits.keys())
        del waits[key]
        ordered.append(tuple(groups[key]))
    return ordered


def layout_of(
    stages: Sequence[Sequence[int]], devices: Sequence[int], needs: Sequence[Sequence[int]], outputs: Sequence[int] = ()
) -> Layout:
    """How stages of operations hang together.

    Args:
        stages: positions of the operations of each.
        devices: by stage.
        needs: by operation: positions of the operations it takes from.
        outputs: operations whose results the last stage needs besides, for the loss.
    """
    home = {position: stage for stage, positions in enumerate(stages) for position in positions}
    last = len(stages) - 1
    found = []
    for stage, positions in enumerate(stages):
        wanted = [n for p in positions for n in needs[p]] + list(outputs if stage == last else ())
        found.append(tuple(sorted({home[n] for n in wanted} - {stage})))
    return Layout(tuple(devices), tuple(found))
