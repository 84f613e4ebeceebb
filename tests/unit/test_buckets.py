"""Bucket plans: the drawing in the module, and what must hold for any list of rows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.comm import buckets
from tfdist.comm.buckets import Row, plan

rows_lists = st.lists(
    st.builds(
        Row,
        name=st.just("v"),
        shape=st.just((1,)),
        dtype=st.sampled_from(["float32", "float16", "float64"]),
        nbytes=st.integers(0, 1000),
        stage=st.integers(0, 2),
    ),
    max_size=40,
)


def test_the_drawing():
    drawing = buckets.__doc__
    given_rows = re.search(r"rows +(.*?) +limit (\d+) bytes", drawing)
    rows = [
        Row(name, (), dtype, int(size)) for name, dtype, size in re.findall(r"(\d+):(f\d),(\d+)", given_rows.group(1))
    ]
    drawn = [
        (int(index), dtype, tuple(int(r) for r in re.findall(r"(\d+): ?\d+", cells)), int(total))
        for index, dtype, cells, total in re.findall(r"bucket (\d) +(f\d) +\|(.*)\| +(\d+)", drawing)
    ]
    assert len(rows) == 5
    assert len(drawn) == 3
    planned = plan(rows, int(given_rows.group(2)))
    assert [(b.index, b.dtype, b.rows, b.nbytes) for b in planned] == drawn


@given(rows_lists, st.integers(1, 2500))
def test_any_plan(rows, limit):
    planned = plan(rows, limit)
    assert sorted(i for b in planned for i in b.rows) == list(range(len(rows)))  # each row once
    assert [b.index for b in planned] == list(range(len(planned)))
    starts = [b.rows[0] for b in planned]
    assert starts == sorted(starts, reverse=True)  # in the order of their first gradient
    for bucket in planned:
        assert list(bucket.rows) == sorted(bucket.rows, reverse=True)
        assert {(rows[i].dtype, rows[i].stage) for i in bucket.rows} == {(bucket.dtype, bucket.stage)}
        assert bucket.nbytes == sum(rows[i].nbytes for i in bucket.rows)
        assert bucket.nbytes <= limit or len(bucket.rows) == 1
    for kind in {(b.dtype, b.stage) for b in planned}:
        same = [b for b in planned if (b.dtype, b.stage) == kind]
        order = [i for b in same for i in b.rows]
        assert order == sorted(order, reverse=True)
        for one, following in zip(same, same[1:], strict=False):  # closed only when full
            assert one.nbytes + rows[following.rows[0]].nbytes > limit


def test_limits():
    assert plan([], 10) == ()
    with pytest.raises(ValueError, match="limit is 0 bytes"):
        plan([Row("a", (1,), "float32", 4)], 0)
