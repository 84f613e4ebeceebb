"""Which ps task holds which part of a model: variables in, holdings out. Pure.

Small variables travel together: the elements of all variables of one type stand in one row, and each ps holds a
stretch of it, cut where the bytes are even. What must be updated as a whole (`alone`) is held whole by one ps. Tables,
of which a batch needs a few rows only, are dealt out row by row, so that often used rows that stand together do not
meet on one ps. A large piece is a tensor of its own: joining costs a copy, and it can leave as soon as it is there::

    row        | kernel 0      |b0| kernel 1        |b1| kernel 2 |
    stretches  |---- ps 0 ----------|---- ps 1 --------------------|     kernel 1 lies on both
    table      rows 0, 2, 4, ... on ps 0; 1, 3, 5, ... on ps 1
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tfdist.comm.buckets import ALIGNMENT, Row

LARGE = 1 << 20  # bytes from which on a piece is not joined with others


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a variable, flattened; `variable` is its index."""

    variable: int
    start: int
    stop: int


@dataclass(frozen=True)
class Holding:
    """What one ps keeps as one tensor.

    Attributes:
        ps: index of the ps task.
        dtype: of its elements.
        pieces: what it holds, in order.
        alone: whether it is one variable, whole and in its own shape.
        deal: of a table the number of ps tasks it is dealt out over: this one has rows ps, ps + deal, ps + 2 deal, ...
            The piece counts its elements. 0 for everything else.
    """

    ps: int
    dtype: str
    pieces: tuple[Piece, ...]
    alone: bool = False
    deal: int = 0


def plan(
    rows: Sequence[Row], tasks: int, alone: Collection[int] = (), tables: Collection[int] = ()
) -> tuple[Holding, ...]:
    """Deals the variables out to `tasks` ps tasks, even by bytes as far as those in `alone` allow.

    Args:
        rows: the variables.
        tasks: number of ps tasks.
        alone: indices of variables that are held whole, in their own shape.
        tables: indices of variables that are dealt out by rows, their first dimension.

    Raises:
        ValueError: there is no ps task.
    """
    if tasks < 1:
        raise ValueError(f"a layout needs at least one ps task, got {tasks}")
    load = [0] * tasks
    holdings = []
    for index in sorted(tables):
        length, *width = rows[index].shape
        for ps in range(min(tasks, length)):
            size = -(-(length - ps) // tasks) * math.prod(width)
            load[ps] += rows[index].nbytes * size // math.prod(rows[index].shape)
            holdings.append(Holding(ps, rows[index].dtype, (Piece(index, 0, size),), deal=tasks))
    for index in sorted(alone, key=lambda i: (-rows[i].nbytes, i)):
        ps = min(range(tasks), key=lambda t: (load[t], t))
        load[ps] += rows[index].nbytes
        holdings.append(Holding(ps, rows[index].dtype, (Piece(index, 0, math.prod(rows[index].shape)),), True))
    fused = [i for i in range(len(rows)) if i not in {*alone, *tables}]
    for dtype in sorted({rows[i].dtype for i in fused}):
        members = [i for i in fused if rows[i].dtype == dtype]
        total = sum(rows[i].nbytes for i in members)
        room = _fill(load, total)
        itemsize = max((rows[i].nbytes // max(math.prod(rows[i].shape), 1) for i in members), default=0) or 1
        for ps, pieces in enumerate(_cut([math.prod(rows[i].shape) for i in members], room, itemsize)):
            mine = [Piece(members[p.variable], p.start, p.stop) for p in pieces]
            large = [p for p in mine if (p.stop - p.start) * itemsize >= LARGE]
            joined = [p for p in mine if p not in large]
            holdings += [Holding(ps, dtype, group) for group in [*((p,) for p in large), tuple(joined)] if group]
            load[ps] += sum(p.stop - p.start for p in pieces) * itemsize
    return tuple(holdings)


def bytes_by_task(holdings: Sequence[Holding], rows: Sequence[Row], tasks: int) -> list[int]:
    """Bytes of parameters that each ps holds."""
    held = [0] * tasks
    for holding in holdings:
        for piece in holding.pieces:
            row = rows[piece.variable]
            held[holding.ps] += row.nbytes * (piece.stop - piece.start) // max(math.prod(row.shape), 1)
    return held


def _fill(load: Sequence[int], total: int) -> list[int]:
    """How many of `total` bytes each task takes so that all end at one level, or as near to it as `load` lets them."""
    order = sorted(range(len(load)), key=lambda t: load[t])
    takes = [0] * len(load)
    for count in range(len(order), 0, -1):
        level = (total + sum(load[t] for t in order[:count])) / count
        if load[order[count - 1]] <= level:
            for t in order[:count]:
                takes[t] = int(level - load[t])
            break
    return takes


def _cut(sizes: Sequence[int], room: Sequence[int], itemsize: int) -> list[list[Piece]]:
    """Stretches of about `room` bytes of the row of variables of `sizes` elements.

    The last task with room takes the rest. A variable is cut at multiples of `ALIGNMENT` only.
    """
    pieces: list[list[Piece]] = [[] for _ in room]
    takers = [t for t in range(len(room)) if room[t] > 0] or [0]
    grain = max(ALIGNMENT // itemsize, 1)
    task, left = 0, room[takers[0]] // itemsize
    for variable, size in enumerate(sizes):
        start = 0
        while True:
            last = task == len(takers) - 1
            stop = size if last or size - start <= left else start + left // grain * grain
            if stop > start or size == 0:
                pieces[takers[task]].append(Piece(variable, start, stop))
                left -= stop - start
                start = stop
            if start == size:
                break
            task += 1
            left = room[takers[task]] // itemsize
    return pieces
