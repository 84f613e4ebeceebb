"""Stages and how they hang together: which device computes each, and what each waits for. Pure.

A stage is some of a model's operations on one device. Where a model is cut in a row, each device has one stage. Where
its branches are on different devices, a device can have several, so that branches run side by side::

    operations            stages
         .-> b1 -> b2 -.       .-> (b1 b2 on 1) -.       b1 can begin when `stem` is done,
    stem                cat  0                    3      before a1 and a2 are.
         '-> a1 -> a2 -'       '-> (a1 a2 on 0) -'
"""

from __future__ import annotations

import functools
import itertools
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

    Args:
        devices: by operation, in an order in which each comes after what it needs.
        needs: by operation: positions of the operations it takes from.

    Returns:
        positions of the operations of each stage, in an order in which each stage comes after what it needs.
    """
    # Operations of one device belong together that come after the same number of changes of device...
    levels: list[int] = []
    for device, mine in zip(devices, needs, strict=True):
        levels.append(max((levels[n] + (devices[n] != device) for n in mine), default=0))
    # ... but those that nothing on other devices waits for come after the others, and hold nobody up.
    awaited = [False] * len(devices)
    for position in reversed(range(len(devices))):
        for need in needs[position]:
            same = devices[need] == devices[position] and levels[need] == levels[position]
            awaited[need] |= awaited[position] if same else devices[need] != devices[position]
    keys = [(levels[i], not awaited[i], devices[i]) for i in range(len(devices))]
    order = sorted(range(len(devices)), key=lambda i: (keys[i], i))
    return [tuple(group) for _, group in itertools.groupby(order, key=lambda i: keys[i])]


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
