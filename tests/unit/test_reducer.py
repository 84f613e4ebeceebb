"""The gradient reducer on threads as ranks, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.comm.collective import Alone
from tfdist.comm.reducer import GradientReducer
from tfdist.comm.threaded import Threaded

NAMES = ["a", "b", "c", "d", "e", "f"]


def dense(rank, shape, dtype="float32"):
    return np.random.default_rng(rank).integers(-8, 8, shape).astype(dtype)


def grads_of(rank):
    slices = tf.IndexedSlices(
        tf.constant(dense(rank, (4, 2))), tf.constant([5, 1, 5, rank], tf.int64), tf.constant([9, 2], tf.int64)
    )
    return [
        tf.constant(dense(rank, (3, 2))), None, tf.constant(dense(rank, (2,), "float16")), slices,
        tf.constant(dense(rank, (5,))), tf.cast(dense(rank, (2, 2)), tf.bfloat16),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("limit", [1, 20, 10_000])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_sums(ranks, limit, compression):
    def work(group):
        reducer = GradientReducer(group, limit, compression)
        facts = tf.constant([1.0, float(group.rank), 1e-30])
        return (*reducer.reduce(grads_of(group.rank), NAMES, "opt", facts), reducer)

    def total(*args):
        return sum(dense(r, *args).astype("float64") for r in range(ranks))

    table = np.zeros((9, 2))
    for r in range(ranks):
        np.add.at(table, [5, 1, 5, r], dense(r, (4, 2)))
    for got, facts, reducer in Threaded.run(ranks, work):
        for index, shape, dtype in ((0, (3, 2), "float32"), (2, (2,), "float16"), (4, (5,), "float32")):
            assert got[index].dtype == dtype
            np.testing.assert_array_equal(got[index], total(shape, dtype))  # small whole numbers: exact
        assert got[1] is None
        assert got[5].dtype == tf.bfloat16
        np.testing.assert_array_equal(tf.cast(got[5], tf.float32), total((2, 2)))
        rows = got[3].indices.numpy()
        assert sorted(rows) == sorted({5, 1, *range(ranks)})  # each touched row once
        np.testing.assert_array_equal(got[3].values, table[rows])
        np.testing.assert_array_equal(facts, np.array([ranks, sum(range(ranks)), ranks * np.float32(1e-30)], "float32"))
        traffic = reducer.traffic["opt"]
        assert traffic.dense == ("a", "c", "e", "f")
        assert traffic.sparse == ("d",)
        assert traffic.absent == ("b",)
        assert traffic.dense_bytes == 24 + 4 + 20 + 16  # bfloat16 counts as the float32 it travels as
        # What travels together starts at multiples of 64 bytes each. The facts (12 bytes) ride along in the first
        # bucket, but are never compressed.
        together = limit == 10000
        if compression:
            assert traffic.wire_bytes == (3 * 64 // 2 + 4 if together else 12 + 4 + 10 + 8)
        else:
            assert traffic.wire_bytes == (4 * 64 + 4 if together else 2 * 64 + 4 + 20 + 24)


def test_sparse_bytes_follow_the_rows_touched():
    def work(group):
        reducer = GradientReducer(group, 100)
        counts = []
        for rows in ([3, 3, 3], [1, 2, 900_000]):
            slices = tf.IndexedSlices(tf.ones([3, 16]), tf.constant(rows), tf.constant([1_000_000, 16]))
            reducer.reduce([slices], ["table"], "opt")
            counts.append(reducer.sparse_bytes)
        return counts

    row = 16 * 4 + 4
    assert Threaded.run(2, work) == [[row, 3 * row]] * 2


def test_the_facts_get_a_tensor_of_their_own_where_no_bucket_takes_them():
    def work(group):
        return GradientReducer(group, 100).reduce([None], ["a"], "opt", tf.constant([2.0]))[1].numpy()

    assert Threaded.run(2, work) == [[4.0]] * 2


@pytest.mark.parametrize(
    ("mine", "theirs", "texts"),
    [
        ([("k", (4, 2))], [("k", (5, 2))], ["'k' float32[4, 2]", "'k' float32[5, 2]"]),
        ([("k", (4,))], [("k", None)], ["'k' float32[4]", "'k' none"]),
        ([("k", (4,))], [("k", (4,)), ("l", (1,))], ["nothing (its list ends before)", "'l' float32[1]"]),
    ],
)
def test_ranks_that_differ_get_an_error_that_shows_both(mine, theirs, texts):
    def work(group):
        table = mine if group.rank == 0 else theirs
        grads = [None if shape is None else tf.zeros(shape) for _, shape in table]
        with pytest.raises(ValueError, match="gradients of 'opt'") as error:
            GradientReducer(group, 100).reduce(grads, [n for n, _ in table], "opt")
        return str(error.value)

    messages = Threaded.run(2, work)
    assert messages[0] == messages[1]
    for text in (*texts, "rank 0 (host0)", "rank 1 (host1)"):
        assert text in messages[0]


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_the_stages_of_a_split_model_have_buckets_of_their_own(compression):
    places = [(0, "/CPU:0")] * 3 + [(1, "/CPU:0")] * 3

    def work(group):
        grads, facts = grads_of(group.rank), tf.constant([1.0])
        reducer = GradientReducer(group, 10_000, compression)
        together, _ = GradientReducer(group, 10_000).reduce(grads, NAMES, "whole", facts)
        got, total = reducer.reduce(grads, NAMES, "split", facts, places)
        for one, other in zip(got, together, strict=True):
            if isinstance(one, tf.Tensor):
                np.testing.assert_array_equal(tf.cast(one, tf.float32), tf.cast(other, tf.float32))
        np.testing.assert_array_equal(got[3].values, together[3].values)
        buckets = reducer.traffic["split"].buckets  # rows of the dense ones: a, c, e, f
        return total.numpy(), [(b.stage, b.dtype, b.rows) for b in buckets]

    expected = [(1, "float32", (3, 2)), (0, "float16", (1,)), (0, "float32", (0,))]
    assert Threaded.run(2, work) == [([2.0], expected)] * 2


def test_ranks_that_cut_differently_get_an_error():
    def work(group):
        with pytest.raises(ValueError, match="'b' float32.*'b of stage 1' float32"):
            GradientReducer(group, 100).reduce(
                [tf.zeros(2)] * 2, ["a", "b"], "opt", None, [(0, "/CPU:0"), (group.rank, "/CPU:0")]
            )

    Threaded.run(2, work)


def test_unknown_shape():
    def work(group):
        reducer = GradientReducer(group, 100)

        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def step(x):
            return reducer.reduce([x], ["k"], "opt")[0]

        step.get_concrete_function()

    with pytest.raises(ValueError, match="gradient of 'k' has the shape"):
        Threaded.run(2, work)


def test_one_rank_changes_nothing():
    grads, facts = grads_of(0), tf.constant([1.0])
    got, same = GradientReducer(Alone(), 100, "fp16", "adasum").reduce(grads, NAMES, "opt", facts)
    assert same is facts
    assert all(a is b for a, b in zip(got, grads, strict=True))


def test_unknown_reduction():
    with pytest.raises(ValueError, match="unknown reduction 'max'"):
        GradientReducer(Alone(), 100, None, "max")
