"""Shares of a global batch: they partition it, and differ by one at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data.shares import bounds, check_batch, describe, has_ghosts


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_shares_partition_the_batch(n, size):
    cuts = [bounds(n, rank, size) for rank in range(size)]
    assert [row for low, high in cuts for row in range(low, high)] == list(range(n))
    sizes = [high - low for low, high in cuts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 8))
def test_ghosts_are_ranks_without_a_sample(samples, batch, size):
    """Against counting every batch's shares; batches are never smaller than the ranks, except the last."""
    if batch < size:
        return
    sizes = [min(batch, samples - start) for start in range(0, samples, batch)]
    empty = any(bounds(n, rank, size)[0] == bounds(n, rank, size)[1] for n in sizes for rank in range(size))
    assert has_ghosts(samples, batch, size) == empty


def test_drawing_of_the_module():
    assert [bounds(10, rank, 3) for rank in range(3)] == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize(
    ("batch", "size", "line"),
    [
        (128, 2, "global batch 128 = 2 x 64"),
        (32, 3, "global batch 32 = 2 x 11 + 1 x 10"),
        (7, 4, "global batch 7 = 3 x 2 + 1 x 1"),
    ],
)
def test_line_that_fit_prints(batch, size, line):
    assert describe(batch, size) == line


def test_batch_below_the_ranks():
    check_batch(4, 4)
    with pytest.raises(ValueError, match="the dataset's batch is 3, but it is the global batch.*there are 4 ranks"):
        check_batch(3, 4, "the dataset's batch")
