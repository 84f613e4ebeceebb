"""The layout of parameters over ps tasks: properties over drawn models, and cases by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.comm.buckets import Row
from tfdist.ps.layout import LARGE, Holding, Piece, bytes_by_task, plan

SIZES = {"float32": 4, "float64": 8, "float16": 2}


def row(index, shape, dtype="float32"):
    return Row(f"v{index}", tuple(shape), dtype, math.prod(shape) * SIZES[dtype])


def itemsize(row):
    return SIZES[row.dtype]


SHAPES = st.lists(st.integers(0, 40) | st.just(700), max_size=3).filter(lambda shape: math.prod(shape) < 1 << 21)
ROWS = st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "float64", "float16"])), min_size=1, max_size=12).map(
    lambda drawn: [row(i, *one) for i, one in enumerate(drawn)]
)


@given(ROWS, st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_every_element_has_one_holder(rows, tasks, alone):
    alone = {i for i in alone if i < len(rows)}
    found = {}
    for holding in plan(rows, tasks, alone):
        assert 0 <= holding.ps < tasks
        assert holding.pieces
        for piece in holding.pieces:
            nbytes = (piece.stop - piece.start) * itemsize(rows[piece.variable])
            assert len(holding.pieces) == 1 or nbytes < LARGE
            assert rows[piece.variable].dtype == holding.dtype
            assert holding.alone == (piece.variable in alone)
            found.setdefault(piece.variable, []).append((piece.start, piece.stop))
    assert set(found) == set(range(len(rows)))
    for index, spans in found.items():
        spans.sort()
        assert spans[0][0] == 0
        assert spans[-1][1] == math.prod(rows[index].shape)
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        if index in alone:
            assert len(spans) == 1


@given(ROWS, st.integers(1, 5))
def test_even_by_bytes(rows, tasks):
    held = bytes_by_task(plan(rows, tasks), rows, tasks)
    assert sum(held) == sum(r.nbytes for r in rows)
    types = len({r.dtype for r in rows})
    # A cut is at most one boundary off, for each type; the last task takes what the others left.
    assert max(held) - sum(held) / tasks <= 2 * 64 * tasks * types + 8


TABLES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=4)


@given(ROWS, TABLES, st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_every_row_of_a_table_has_one_holder(others, tables, tasks, alone):
    """Among other variables, which have one holder for each element as before."""
    rows = [*others, *(row(len(others) + i, shape) for i, shape in enumerate(tables))]
    alone = {i for i in alone if i < len(others)}
    holdings = plan(rows, tasks, alone, range(len(others), len(rows)))
    for index, (length, *width) in enumerate(tables, len(others)):
        mine = [h for h in holdings if h.pieces[0].variable == index]
        assert [h.ps for h in mine] == list(range(min(tasks, length)))
        held = [range(h.ps, length, h.deal) for h in mine]
        assert sorted(r for numbers in held for r in numbers) == list(range(length))
        for holding, numbers in zip(mine, held, strict=True):
            assert (holding.deal, holding.alone, holding.dtype) == (tasks, False, "float32")
            assert holding.pieces == (Piece(index, 0, len(numbers) * math.prod(width)),)
    elements = {}
    for piece in (p for h in holdings for p in h.pieces):
        elements[piece.variable] = elements.get(piece.variable, 0) + piece.stop - piece.start
    assert elements == {i: math.prod(r.shape) for i, r in enumerate(rows)}
    assert sum(bytes_by_task(holdings, rows, tasks)) == sum(r.nbytes for r in rows)


@given(TABLES, st.integers(1, 5))
def test_tables_are_even_within_a_row_each(tables, tasks):
    rows = [row(i, shape) for i, shape in enumerate(tables)]
    held = bytes_by_task(plan(rows, tasks, (), range(len(rows))), rows, tasks)
    assert max(held) - min(held) <= sum(r.nbytes // r.shape[0] for r in rows)


def test_what_a_table_leaves_uneven_the_rest_fills_up():
    rows = [row(0, (3, 100)), row(1, (100,))]
    holdings = plan(rows, 2, (), {0})
    assert holdings == (
        Holding(0, "float32", (Piece(0, 0, 200),), deal=2),
        Holding(1, "float32", (Piece(0, 0, 100),), deal=2),
        Holding(1, "float32", (Piece(1, 0, 100),)),
    )


def test_p6_one_large_and_many_small_variables_are_even():
    """P6: within 10 % of each other."""
    rows = [row(0, (1000, 1000)), *(row(i, (17,)) for i in range(1, 300))]
    held = bytes_by_task(plan(rows, 3), rows, 3)
    assert max(held) <= 1.1 * min(held)


def test_a_variable_is_cut_at_64_bytes():
    holdings = plan([row(0, (100,)), row(1, (100,))], 2)
    assert holdings == (
        Holding(0, "float32", (Piece(0, 0, 100),)),
        Holding(1, "float32", (Piece(1, 0, 100),)),
    )
    first, second = plan([row(0, (250,)), row(1, (10,))], 2)
    assert first.pieces == (Piece(0, 0, 128),)
    assert second.pieces == (Piece(0, 128, 250), Piece(1, 0, 10))


def test_what_is_large_is_not_joined():
    """A copy of it would cost more than a message of its own."""
    rows = [row(0, [10]), row(1, [1024, 256]), row(2, [16]), row(3, [1024, 255])]
    assert plan(rows, 1) == (
        Holding(0, "float32", (Piece(1, 0, 1024 * 256),)),
        Holding(0, "float32", (Piece(0, 0, 10), Piece(2, 0, 16), Piece(3, 0, 1024 * 255))),
    )


def test_what_stands_alone_goes_to_the_emptiest_and_the_rest_fills_up():
    rows = [row(0, (100,)), row(1, (400,)), row(2, (300,)), row(3, (1000,))]
    holdings = plan(rows, 2, {1, 2})
    assert holdings[:2] == (
        Holding(0, "float32", (Piece(1, 0, 400),), True),
        Holding(1, "float32", (Piece(2, 0, 300),), True),
    )
    assert bytes_by_task(holdings, rows, 2) == [3600, 3600]


def test_no_ps_is_an_error():
    with pytest.raises(ValueError, match="at least one ps task, got 0"):
        plan([row(0, (1,))], 0)
