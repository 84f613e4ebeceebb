"""What workers leave on the ps tasks and the chief combines: queues on this process's own CPU."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_ps_store import assert_same, store_of, variables
from tests.unit.test_ps_tables import SHAPES, TABLES, batches, dense, slices
from tfdist.ps.consistency import LocalSGD, Sync
from tfdist.ps.deposits import Deposits, Like

NUMBERS = itertools.count()
LIKES = [
    Like(tf.TensorShape([3]), tf.float32),
    Like(tf.TensorShape([5, 2]), tf.float32, rows=True),
    Like(tf.TensorShape([]), tf.int64),
]


def deposits(likes=tuple(LIKES)):
    return Deposits("/CPU:0", likes, f"deposits{next(NUMBERS)}")


def put(queue, call, value, ids=(0,), count=0):
    rows = tf.IndexedSlices(tf.fill([len(ids), 2], float(value)), tf.constant(ids, tf.int32))
    queue.put(tf.constant(call, tf.int64), [tf.fill([3], float(value)), rows, tf.constant(count, tf.int64)])


def weighted(queue, calls, weights):
    """(dense, the table's gradient as a whole, counter)."""
    sums = tf.function(queue.weighted, autograph=False)(tf.constant(calls, tf.int64), tf.constant(weights, tf.float32))
    whole = np.zeros((5, 2), "float32")
    whole[sums[1].indices.numpy()] = sums[1].values.numpy()
    assert len(set(sums[1].indices.numpy())) == len(sums[1].indices)
    return sums[0].numpy(), whole, int(sums[2])


def test_a_weighted_sum():
    """In whatever order they came; rows that several have meet; of counters the largest counts."""
    queue = deposits()
    put(queue, 7, 2.0, ids=(0, 3), count=4)
    put(queue, 5, 8.0, ids=(3, 4), count=9)
    flat, rows, count = weighted(queue, [5, 7], [0.25, 0.75])
    np.testing.assert_allclose(flat, [3.5] * 3)
    np.testing.assert_allclose(rows[:, 0], [1.5, 0, 0, 3.5, 2.0])
    assert count == 9


def test_a_call_that_ran_again_counts_once_and_others_are_dropped():
    queue = deposits()
    put(queue, 1, 2.0)
    put(queue, 1, 2.0)
    put(queue, 0, 100.0, count=77)  # of a step before, too late
    put(queue, 2, 4.0)
    flat, rows, count = weighted(queue, [1, 2], [0.5, 0.5])
    np.testing.assert_allclose(flat, [3.0] * 3)
    np.testing.assert_allclose(rows[0], [3.0] * 2)
    assert count == 0
    put(queue, 3, 1.0)  # the queue was emptied
    np.testing.assert_allclose(weighted(queue, [3], [1.0])[0], [1.0] * 3)


def test_what_is_dropped_does_no_harm():
    queue = deposits()
    put(queue, 1, float("nan"))
    put(queue, 2, 4.0)
    put(queue, 3, float("inf"))
    flat, rows, _ = weighted(queue, [2], [1.0])
    np.testing.assert_allclose(flat, [4.0] * 3)
    np.testing.assert_allclose(rows[0], [4.0] * 2)


def test_nothing_deposited_is_zero():
    flat, rows, count = weighted(deposits(), [1], [1.0])
    assert not flat.any()
    assert not rows.any()
    assert count == 0


def test_no_rows_at_all():
    queue = deposits()
    put(queue, 1, 1.0, ids=())
    assert not weighted(queue, [1], [1.0])[1].any()


def deposit(store, grads, call, changes=()):
    mine = [store.dense(i, g) for i, g in enumerate(slices(grads))]
    store.deposit(mine, list(changes), tf.constant(call, tf.int64))


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "global_clipnorm, not reached": lambda: keras.optimizers.SGD(0.1, global_clipnorm=1e6),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.2),
    "Lamb": lambda: keras.optimizers.Lamb(0.01, clipnorm=0.5),  # its variables stand alone
    "no clipping by zero": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.0),
}


@pytest.mark.parametrize("tasks", [2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_of_two_shares_is_that_of_keras_on_their_mean(kind, tasks):
    """Clipped after the mean, as a whole, wherever the pieces lie."""
    ours, theirs = variables(SHAPES), variables(SHAPES)
    optimizer, oracle = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    oracle.build(theirs)
    tables = () if kind == "Lamb" else TABLES
    store = store_of(optimizer, ours, tasks=tasks, consistency=Sync(), tables=tables)
    given = batches(5)[1:]
    for step, pair in enumerate((given[:2], given[2:])):
        for share, grads in enumerate(pair):
            deposit(store, grads if tables else dense(grads), 2 * step + share)
        rate = 0.0 if kind == "schedule" else float(optimizer.learning_rate)
        store.combine([2 * step, 2 * step + 1], [0.25, 0.75], rate)
        oracle.apply([0.25 * a + 0.75 * b for a, b in zip(*map(dense, pair), strict=True)], theirs)
    store.fetch()
    assert_same(ours, theirs)
    assert_same(optimizer.variables, oracle.variables)
    assert store.updates() == 2


def test_statistics_are_averaged_and_counters_keep_step():
    mean, count = keras.Variable(np.ones(2, "float32")), keras.Variable(np.array(3), dtype="int64")
    store = store_of(keras.optimizers.SGD(0.1), variables(SHAPES), [mean, count], consistency=Sync(), tables=TABLES)
    first, second = batches(3)[1:]
    deposit(store, first, 0, [tf.constant([1.0, 2.0]), tf.constant(1, tf.int64)])
    deposit(store, second, 1, [tf.constant([3.0, 2.0]), tf.constant(1, tf.int64)])
    store.combine([0, 1], [0.5, 0.5], 0.1)
    store.fetch()
    np.testing.assert_allclose(mean.numpy(), [3.0, 3.0])
    assert int(count) == 4


def test_copies_are_averaged_slots_too():
    """LocalSGD: what is left is the copies themselves; iterations are those of the one that got furthest."""
    ours = variables([(30,), (8, 4)])
    optimizer = keras.optimizers.Adam(0.01)
    store = store_of(optimizer, ours, consistency=LocalSGD(2))
    for call, steps in enumerate((2, 1)):
        for part in store.parts:
            held = [v.value for v in (*part.kept, *part.optimizer.variables)]
            copy = [tf.fill(v.shape, tf.cast(call + 1 if v.dtype.is_floating else steps, v.dtype)) for v in held]
            part.deposit(tf.constant(call, tf.int64), copy)
    store.combine([0, 1], [0.75, 0.25], 0.0)
    store.fetch()
    for variable in (*ours, *[v for v in optimizer.variables if len(v.shape)]):
        np.testing.assert_allclose(variable.numpy(), 1.25)
    assert int(optimizer.iterations) == 2
