"""Where the rows that a rank predicted belong in the whole input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.data.shares import bounds
from tfdist.trainers.gathering import Seen, block, placed


def seen(shares, together=True):
    record = Seen()
    record.shares, record.together = shares, together
    return record


@given(st.lists(st.integers(1, 20), max_size=6), st.integers(1, 5))
def test_cut_batches_come_back_in_order(batches, size):
    everything = []
    for rank in range(size):
        counts = [bounds(n, rank, size) for n in batches]
        shares = [(max(1, high - low), high - low, n) for (low, high), n in zip(counts, batches, strict=True)]
        keep, places = placed(seen(shares), rank, size)
        assert keep.sum() == len(places) == sum(high - low for low, high in counts)
        everything += places.tolist()
    assert sorted(everything) == list(range(sum(batches)))


def test_own_batches_come_rank_by_rank():
    first, second = (placed(seen([(3, 3, 5), (2, 2, 4)], False), rank, 2)[1] for rank in (0, 1))
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert (np.diff(second) == 1).all() and second[0] > first[-1]


@pytest.mark.parametrize(("n", "size"), [(7, 3), (1, 2), (2, 3)])
def test_blocks_of_arrays(n, size):
    x = {"a": np.arange(n), "b": [np.arange(n) * 2, None]}
    joined = []
    for rank in range(size):
        part, low, count = block(x, rank, size)
        assert len(part["a"]) == max(1, count) and part["b"][1] is None
        np.testing.assert_array_equal(part["b"][0], 2 * part["a"])
        joined += part["a"][:count].tolist()
        assert count == 0 or part["a"][0] == low
    assert joined == list(range(n))
