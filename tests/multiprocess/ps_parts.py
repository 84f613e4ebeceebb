"""What the checks of the parameter server share: a register of them, models, and comparison with plain Keras."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

CHECKS: dict[int, list] = {1: [], 2: []}
CLUSTER = {}  # "cluster": the LocalCluster of this process, for checks that end its tasks
SPARSE = "sparse_categorical_crossentropy"


class Sum(keras.metrics.Metric):
    """Of the labels."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self):
        return self.total


def with_workers(count):
    def note(check):
        CHECKS[count].append(check)
        return check

    return note


def data(rows=100, columns=8):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, columns)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int32") + (x[:, 0] > 1)


def batches(x, y, *rest, size=16):
    """One batch after the other, once; each with `rest` at its end."""
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size], *rest


def dense(**kwargs):
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu", **kwargs), keras.layers.Dense(3, "softmax")]
    )


def pair(strategy, build, optimizer, loss=SPARSE, metrics=("accuracy",), **kwargs):
    """(distributed, plain) models that begin alike."""
    models = []
    for distributed in (True, False):
        keras.utils.set_random_seed(4)
        model = build()
        if distributed:
            model = strategy.distribute(model)
        model.compile(optimizer(), loss, metrics=list(metrics) or None, **kwargs)
        models.append(model)
    return models


def assert_like_plain(strategy, build, optimizer, fit=None, x=None, y=None, **kwargs):
    """One worker trains as one process does: weights, optimizer, logs."""
    if x is None:
        x, y = data()
    ours, plain = pair(strategy, build, optimizer, **kwargs)
    histories = [
        m.fit(x, y, **{"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}).history
        for m in (ours, plain)
    ]
    assert_same(ours, plain)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[1].items():
        np.testing.assert_allclose(histories[0][name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    return ours, plain


def assert_same(ours, plain):
    for one, other in zip(
        [*ours.weights, *ours.optimizer.variables], [*plain.weights, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=3e-6, rtol=1e-4, err_msg=other.path)


def refused(call, words):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error; expected one with {words!r}")


@contextlib.contextmanager
def under(strategy, consistency):
    """Models that are distributed within train under another consistency, on the same tasks."""
    before, strategy.consistency = strategy.consistency, consistency
    try:
        yield
    finally:
        strategy.consistency = before
