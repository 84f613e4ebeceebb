"""What is done to late gradients, against the papers' formulas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.test_ps_store import store_of, variables
from tfdist.ps.consistency import Async

RATE = 0.1


def late_push(consistency, lateness, shapes=((9, 4), (30,)), tables=(0,)):
    """One update whose gradient is so many updates late: (w_then, w_now, gradient, w_after, what push returned)."""
    ours = variables(shapes)
    store = store_of(keras.optimizers.SGD(RATE), ours, consistency=consistency, tables=tables)
    random = np.random.default_rng(5)

    def gradients():
        return [random.normal(size=s).astype("float32") for s in shapes]

    def push(grads, pulled, call):
        given = [
            tf.IndexedSlices(tf.constant(g), tf.range(g.shape[0])) if i in tables else tf.constant(g)
            for i, g in enumerate(grads)
        ]
        return int(store.push(given, [], tf.constant(RATE), pulled, (tf.constant(call, tf.int64), zero)))

    def now():
        store.fetch()
        return [v.numpy() for v in ours]

    zero, then, pulled = tf.constant(0, tf.int64), now(), store.pull()
    for call in range(lateness):
        push(gradients(), store.pull(), call)
    before, grads = now(), gradients()
    found = push(grads, pulled, lateness)
    return zip(then, before, grads, now(), strict=True), found


@pytest.mark.parametrize("lateness", [0, 1, 3])
def test_as_it_is(lateness):
    values, found = late_push(Async(), lateness)
    assert found == lateness
    for _, before, gradient, after in values:
        np.testing.assert_allclose(after, before - RATE * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lateness", [0, 1, 3])
def test_scale_divides_the_rate(lateness):
    values, found = late_push(Async("scale"), lateness)
    assert found == lateness
    for _, before, gradient, after in values:
        np.testing.assert_allclose(after, before - RATE / max(lateness, 1) * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lateness", [0, 3])
def test_dc_compensates_the_delay(lateness):
    """Rows of a table stay as they are."""
    values, found = late_push(Async("dc", 0.5), lateness)
    assert found == lateness
    table, rest = values
    then, before, gradient, after = rest
    corrected = gradient + 0.5 * gradient * gradient * (before - then)
    np.testing.assert_allclose(after, before - RATE * corrected, rtol=1e-5, atol=1e-6)
    assert lateness == 0 or np.abs(corrected - gradient).max() > 0.01
    _, before, gradient, after = table
    np.testing.assert_allclose(after, before - RATE * gradient, rtol=1e-5, atol=1e-6)


def test_scale_of_a_schedule():
    """The schedule's rate is divided as well."""
    ours = variables([(5,)])
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.3])
    store = store_of(keras.optimizers.SGD(schedule), ours, consistency=Async("scale"), tasks=1)
    old, one = store.pull(), tf.ones(5)
    before = ours[0].numpy()
    for call in range(3):  # 0, 1 and 2 updates late
        number = tf.constant(call, tf.int64)
        store.push([one], [], tf.constant(0.0), old, (number, tf.constant(0, tf.int64)))
    store.fetch()
    np.testing.assert_allclose(before - ours[0].numpy(), 0.5 + 0.5 + 0.3 / 2, rtol=1e-5)
