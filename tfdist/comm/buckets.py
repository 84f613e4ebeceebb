"""Which gradients travel together. Pure: no TensorFlow, no communication, the same answer on every rank.

The backward pass makes gradients of the last layers first, so rows are taken from the end of the variable list
backwards; each element type fills buckets of its own, and a bucket closes when the next row would not fit. So does
each stage of a split model: its gradients are on another device, and there long before those of the stage in front.

    rows     0:f4,400   1:f4,300   2:f2,200   3:f4,500   4:f4,100        limit 700 bytes
             --------------------------------------------------->  order of the variables
             <---------------------------------------------------  order of packing

    bucket 0   f4   | 4: 100 | 3: 500 |          600     (row 1 would make 900: closed)
    bucket 1   f2   | 2: 200 |                   200     (another element type)
    bucket 2   f4   | 1: 300 | 0: 400 |          700

Buckets are numbered by their first row, which is the order in which the backward pass can start them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes; only tensors that start at a multiple of it can share memory in TensorFlow


@dataclass(frozen=True)
class Row:
    """One gradient: its variable's name, static shape, element type, size in bytes and the stage it is made on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    stage: int = 0


@dataclass(frozen=True)
class Bucket:
    """Rows (positions in the planned list, in packing order) of one stage that travel as one tensor."""

    index: int
    dtype: str
    rows: tuple[int, ...]
    nbytes: int
    stage: int = 0


def plan(rows: Sequence[Row], limit_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most `limit_bytes`; a larger row is a bucket of its own.

    Raises:
      ValueError: the limit is not positive.
    """
    if limit_bytes <= 0:
        raise ValueError(f"the bucket limit is {limit_bytes} bytes; it has to be positive")
    filling: dict[tuple[int, str], list[int]] = {}  # (stage, element type) -> rows of its open bucket
    groups: list[list[int]] = []  # in order of their first row
    for index in range(len(rows) - 1, -1, -1):
        row = rows[index]
        group = filling.get((row.stage, row.dtype))
        if group is None or _size(rows, group) + row.nbytes > limit_bytes:
            group = filling[row.stage, row.dtype] = []
            groups.append(group)
        group.append(index)
    return tuple(
        Bucket(number, rows[group[0]].dtype, tuple(group), _size(rows, group), rows[group[0]].stage)
        for number, group in enumerate(groups)
    )


def _size(rows: Sequence[Row], group: Sequence[int]) -> int:
    return sum(rows[i].nbytes for i in group)
