"""The parameter server's store on this process's own CPU: updates against Keras' optimizer itself."""

from __future__ import annotations

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.ps.slots import Slots, check, stands_alone
from tfdist.ps.store import Store

NUMBERS = itertools.count()
SHAPES = [(30, 20), (20,), (20, 7), (7,), ()]
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "EMA": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}


def variables(shapes=SHAPES):
    random = np.random.default_rng(0)
    return [keras.Variable(random.normal(size=s).astype("float32"), name=f"v{i}") for i, s in enumerate(shapes)]


def gradients(count, shapes=SHAPES):
    random = np.random.default_rng(1)
    return [[random.normal(size=s).astype("float32") for s in shapes] for _ in range(count)]


def store_of(optimizer, trained, statistics=(), tasks=2, **kwargs):
    """A store that has been loaded."""
    if not optimizer.built:
        optimizer.build(trained)
    name = f"test{next(NUMBERS)}"
    store = Store(["/CPU:0"] * tasks, optimizer, trained, list(statistics), name, **kwargs)
    store.load()
    return store


def pusher(store, rate=0.0):
    """A function (gradients, number of the call) -> lateness, as a worker's graph."""

    @tf.function(autograph=False)
    def push(grads, call):
        pulled = store.pull()
        changes = [tf.ones_like(s) for s in pulled.statistics]
        return store.push(grads, changes, tf.constant(rate, tf.float32), pulled, (call, tf.constant(0, tf.int64)))

    return lambda grads, call: int(push([tf.constant(g) for g in grads], tf.constant(call, tf.int64)))


def assert_same(some, others, atol=1e-6):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_keras(kind):
    """Slots that were there before go along, and come back."""
    ours, theirs = variables(), variables()
    optimizer, oracle = OPTIMIZERS[kind](), OPTIMIZERS[kind]()
    if kind == "AdamW":
        optimizer.exclude_from_weight_decay(var_list=[ours[1]])
        oracle.exclude_from_weight_decay(var_list=[theirs[1]])
    optimizer.build(ours)
    oracle.build(theirs)
    first, *rest = gradients(5)
    optimizer.apply(first, ours)
    oracle.apply(first, theirs)
    store = store_of(optimizer, ours)
    push = pusher(store, 0.0 if kind == "schedule" else float(optimizer.learning_rate))
    for number, grads in enumerate(rest):
        assert push(grads, number) == 0
        oracle.apply(grads, theirs)
    store.fetch()
    assert_same(ours, theirs)
    assert_same(optimizer.variables, oracle.variables)
    assert store.updates() == 4


def test_a_call_that_runs_again_updates_nothing_twice():
    ours = variables()
    optimizer = keras.optimizers.Adam(0.1)
    counter = keras.Variable(np.zeros(3, "float32"), trainable=False)
    store = store_of(optimizer, ours, [counter])
    push = pusher(store, 0.1)
    grads = gradients(1)[0]
    assert push(grads, 7) == 0
    store.fetch()
    once = [v.numpy() for v in (*ours, *optimizer.variables)]
    assert push(grads, 7) == -1
    store.fetch()
    for before, after in zip(once, (*ours, *optimizer.variables), strict=True):
        np.testing.assert_array_equal(before, after.numpy())
    np.testing.assert_array_equal(counter.numpy(), 1.0)
    assert int(optimizer.iterations) == store.updates() == 1


def test_a_late_gradient_knows_how_late_it_is():
    ours = variables()
    optimizer = keras.optimizers.SGD(0.1)
    store = store_of(optimizer, ours)
    push = pusher(store, 0.1)
    grads = gradients(1)[0]
    for number in range(3):
        push(grads, number)

    @tf.function(autograph=False)
    def stale():
        rate, call = tf.constant(0.1), tf.constant(9, tf.int64)
        pulled = dataclasses.replace(store.pull(), versions=[tf.constant(1, tf.int64)] * 2)
        return store.push([tf.constant(g) for g in grads], [], rate, pulled, (call, tf.constant(0, tf.int64)))

    assert int(stale()) == 2


def test_the_learning_rate_of_the_call_counts():
    ours = variables([(4,)])
    optimizer = keras.optimizers.SGD(0.1)
    store = store_of(optimizer, ours, tasks=1)
    before = ours[0].numpy()
    pusher(store, 0.5)([np.ones(4, "float32")], 0)
    store.fetch()
    np.testing.assert_allclose(before - ours[0].numpy(), 0.5, rtol=1e-6)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)  # the user's own stays


def test_constraints_hold_and_stand_alone():
    ours = variables([(4, 3), (3,)])
    ours[0].constraint = keras.constraints.UnitNorm(axis=0)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(ours)
    assert [stands_alone(optimizer, v) for v in ours] == [True, False]
    store = store_of(optimizer, ours)
    pusher(store, 0.1)(gradients(1, [(4, 3), (3,)])[0], 0)
    store.fetch()
    np.testing.assert_allclose(np.linalg.norm(ours[0].numpy(), axis=0), 1.0, rtol=1e-5)


def test_more_ps_than_parameters():
    ours = variables([(3,)])
    optimizer = keras.optimizers.SGD(0.1)
    store = store_of(optimizer, ours, tasks=4)
    assert len(store.parts) == 1
    assert pusher(store, 0.1)([np.ones(3, "float32")], 0) == 0


def test_what_cannot_work_is_refused_by_name():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="LossScaleOptimizer keeps one loss scale"):
        check(scaled)
    with pytest.raises(ValueError, match="Adam has both clipnorm and gradient_accumulation_steps"):
        check(keras.optimizers.Adam(clipnorm=1.0, gradient_accumulation_steps=2))

    class Own(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.table = self.add_variable((3,), name="table")

    optimizer = Own()
    optimizer.build(variables([(2,), (3,)]))
    with pytest.raises(ValueError, match="Own keeps .*table outside of lists"):
        Slots(optimizer, 2)
