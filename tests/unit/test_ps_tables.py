"""Tables held by rows, on this process's own CPU: look-ups against numpy, updates against Keras' optimizer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_ps_store import assert_same, store_of, variables

SHAPES = [(11, 3), (4,), (7, 2, 2)]
TABLES = (0, 2)
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "EMA": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


def batches(count, shapes=SHAPES):
    """Gradients by variable: (ids, rows) of tables, ids repeated; arrays of the others."""
    random = np.random.default_rng(2)
    found = []
    for number in range(count):
        grads = []
        for index, shape in enumerate(shapes):
            if index in TABLES:
                ids = random.integers(0, shape[0], 6 if number else 0)  # the first batch asks for no row
                grads.append((ids, random.normal(size=(len(ids), *shape[1:])).astype("float32")))
            else:
                grads.append(random.normal(size=shape).astype("float32"))
        found.append(grads)
    return found


def slices(grads, shapes=SHAPES):
    return [
        tf.IndexedSlices(tf.constant(g[1]), tf.constant(g[0]), tf.constant(s, tf.int64))
        if isinstance(g, tuple)
        else tf.constant(g)
        for g, s in zip(grads, shapes, strict=True)
    ]


def dense(grads, shapes=SHAPES):
    found = []
    for gradient, shape in zip(grads, shapes, strict=True):
        if isinstance(gradient, tuple):
            whole = np.zeros(shape, "float32")
            np.add.at(whole, gradient[0], gradient[1])
            found.append(whole)
        else:
            found.append(gradient)
    return found


def pusher(store, rate):
    """A function (gradients, number of the call) that makes one update, as a worker does."""

    @tf.function(autograph=False, reduce_retracing=True)
    def work(grads, call):
        pulled = store.pull()
        mine = [store.dense(i, g) for i, g in enumerate(grads)]
        return store.push(mine, [], tf.constant(rate, tf.float32), pulled, (call, tf.constant(0, tf.int64)))

    return lambda grads, call: int(work(slices(grads), tf.constant(call, tf.int64)))


@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_looked_up_rows_are_those_of_numpy(tasks, dtype):
    ours = variables([*SHAPES, (1, 5)])
    store = store_of(keras.optimizers.SGD(0.1), ours, tasks=tasks, tables=(0, 2, 3))
    random = np.random.default_rng(3)
    assert [v is None for v in store.pull().values] == [True, False, True, True]
    for index in (0, 2, 3):
        table = ours[index].numpy()
        for shape in ((), (9,), (2, 3, 2), (0, 4)):
            ids = random.integers(0, len(table), shape).astype(dtype)
            found = store.look_up(index, tf.constant(ids, dtype))
            np.testing.assert_array_equal(found.numpy(), np.take(table, ids, axis=0))
            assert found.dtype == tf.float32


def test_unknown_numbers_of_ids_keep_what_is_known():
    ours = variables()
    store = store_of(keras.optimizers.SGD(0.1), ours, tables=(0,))
    spec = tf.TensorSpec([None, 3], tf.int32)
    function = tf.function(lambda ids: store.look_up(0, ids), autograph=False).get_concrete_function(spec)
    assert function.structured_outputs.shape.as_list() == [None, 3, 20]


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_out_of_range_names_the_table(wrong):
    store = store_of(keras.optimizers.SGD(0.1), variables(SHAPES), tables=TABLES)
    look_up = tf.function(lambda ids: store.look_up(0, ids), autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="v0 has 11 rows, and a batch asks for others"):
        look_up(tf.constant([3, wrong]))


@pytest.mark.parametrize(("kind", "tasks"), [*((kind, 2) for kind in OPTIMIZERS), ("Adam", 1), ("SGD", 3)])
def test_updates_are_those_of_keras_on_the_dense_gradient(kind, tasks):
    """Which rows of the ps tasks' tables no batch asked for moves too, where the optimizer's rule says so."""
    ours, theirs = variables(SHAPES), variables(SHAPES)
    optimizer, oracle = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    oracle.build(theirs)
    store = store_of(optimizer, ours, tasks=tasks, tables=TABLES)
    push = pusher(store, float(optimizer.learning_rate))
    for number, grads in enumerate(batches(4)):
        assert push(grads, number) == 0
        oracle.apply(dense(grads), theirs)
    store.fetch()
    assert_same(ours, theirs)
    assert_same(optimizer.variables, oracle.variables)


def test_a_table_without_a_gradient_counts_as_one_of_zero():
    ours, theirs = variables(SHAPES), variables(SHAPES)
    optimizer, oracle = (keras.optimizers.Adam(0.01) for _ in range(2))
    oracle.build(theirs)
    store = store_of(optimizer, ours, tables=TABLES)
    _, second = batches(2)
    pusher(store, 0.01)(second, 0)
    oracle.apply(dense(second), theirs)

    @tf.function(autograph=False)
    def nothing():
        pulled = store.pull()
        mine = [store.dense(i, None) for i in range(3)]
        return store.push(mine, [], tf.constant(0.01), pulled, (tf.constant(1, tf.int64), tf.constant(0, tf.int64)))

    nothing()
    oracle.apply([np.zeros(s, "float32") for s in SHAPES], theirs)
    store.fetch()
    assert_same(ours, theirs)


def test_p2_values_and_slots_go_to_another_number_of_ps():
    """P2: trained on three ps, fetched, loaded to one, and on; in between the chief holds whole variables."""
    ours, theirs = variables(SHAPES), variables(SHAPES)
    optimizer, oracle = (keras.optimizers.Adam(0.01) for _ in range(2))
    oracle.build(theirs)
    for number, (grads, tasks) in enumerate(zip(batches(4), (3, 1, 2, 4), strict=True)):
        store = store_of(optimizer, ours, tasks=tasks, tables=TABLES if tasks != 2 else ())
        pusher(store, 0.01)(grads if tasks != 2 else dense(grads), number)
        store.fetch()
        oracle.apply(dense(grads), theirs)
        assert_same(ours, theirs)
        assert_same(optimizer.variables, oracle.variables)
