"""What happens inside a step: gradients, traffic, loss scaling, statistics, random masks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

CHECKS = Checks(__name__)
O = keras.optimizers


def trained(ring, build, optimizer, loss=None, x=None, y=None, compile_=None, start=None, strategy=None, **kwargs):
    """A model after `fit`, by plain Keras without a strategy."""
    if x is None:
        x, y = data(32)
    model = strategy.distribute(build()) if strategy else build()
    model.compile(optimizer, loss or cross_entropy(), **(compile_ or {}))
    if start is not None:
        model.set_weights(start)
    model.fit(x, y, **{"verbose": 0, "shuffle": False, **kwargs})
    return model


def alike(ring, build, make, tolerance=3e-6, **kwargs):
    """Trains plainly (on one rank, told to all) and on the ring from the same weights; both must end alike."""
    start = build().get_weights()
    start = ring.everywhere(start)[0]
    plain = None
    if ring.rank == 0:
        plain = trained(ring, build, make(), start=start, **kwargs).get_weights()
    model = trained(ring, build, make(), start=start, strategy=ring.strategy, **kwargs)
    for one, other in zip(model.get_weights(), ring.everywhere(plain)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    return model


# The others are compared in test_parity.
OPTIMIZERS = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop")


@CHECKS
def r1_every_optimizer(ring):
    """R1: one `fit` step with each optimizer of Keras 3."""
    x, y = data(32)
    ends = []
    for strategy in (None, ring.strategy):
        for name in OPTIMIZERS:
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((8,)), L.Dense(4)])
            model = strategy.distribute(model) if strategy else model
            model.compile(getattr(O, name)(0.01), cross_entropy(), run_eagerly=True)
            model.fit(x, y, batch_size=32, verbose=0)
            ends.append(model.get_weights())
    for name, plain, ours in zip(OPTIMIZERS, ends, ends[len(OPTIMIZERS) :], strict=False):
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=name)


def noting(kind, method, calls, bytes_):
    def sent(tensor, name, *args):
        calls.append(f"{kind} {name}")
        bytes_.append(int(tf.size(tensor)) * tensor.dtype.size)
        return method(tensor, name, *args)

    return sent


def counting(model, calls, bytes_):
    """Notes the names and bytes of what a model's ring sends; the steps must run eagerly."""
    comm = model.__dict__["_tfdist"].comm
    for kind in ("all_reduce", "all_gather"):
        comm.__dict__[kind] = noting(kind, getattr(comm, kind), calls, bytes_)
    return lambda: [comm.__dict__.pop(kind) for kind in ("all_reduce", "all_gather")]


class Marks(keras.callbacks.Callback):
    """Notes in `calls` where a step begins and ends."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(f"step {batch}")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append("between")


def in_steps(calls):
    """The collectives of each step, by step."""
    steps, now = {}, None
    for call in calls:
        if call.startswith("step ") or call == "between":
            now = call
        elif now != "between" and now is not None:
            steps.setdefault(now, []).append(call)
    return steps


@CHECKS
def r12_clipping(ring):
    """R12: each way to clip sees the gradient of the joined batch; here the ranks' own would clip otherwise."""
    x, y = data(23)
    x[:12] *= 10  # rank 0's gradient is the larger one
    for how in ({"global_clipnorm": 0.05}, {"clipnorm": 0.05}, {"clipvalue": 0.02}):
        alike(ring, dense, lambda how=how: O.SGD(0.5, **how), x=x, y=y, batch_size=23)


@CHECKS
def r13_only_touched_rows_travel(ring):
    """R13: what is sent for an embedding follows the rows touched, repeated ids once; not the table."""
    ids = np.array([[1, 1, 1], [2, 2, 1], [7, 1, 1], [7, 7, 7]])
    model = ring.strategy.distribute(
        keras.Sequential([keras.Input((3,), dtype="int32"), L.Embedding(10_000, 8), L.Flatten(), L.Dense(1)])
    )
    model.compile(O.SGD(0.1), "mse", run_eagerly=True)
    call = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(ids, np.zeros(4), **call)  # the first step also compares and measures
    calls, sent = [], []
    stop = counting(model, calls, sent)
    model.fit(ids, np.zeros(4), **call, callbacks=[Marks(calls)])
    stop()
    rows = [(c, b) for c, b in zip([c for c in calls if c.startswith("all_")], sent, strict=True) if "sparse" in c]
    touched = 2  # ids 1 and 2 on rank 0, 1 and 7 on rank 1: eight floats and an index each
    assert sum(b for _, b in rows) == touched * (8 * 4 + 4), rows
    assert sum(sent) < 2_000


@CHECKS
def r14_no_traffic_between_updates(ring):
    """R14: gradient accumulation sends gradients with every third step only; with loss scaling one flag besides."""
    x, y = data(96)
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = ring.strategy.distribute(dense())
        model.compile(O.SGD(0.1, gradient_accumulation_steps=3), cross_entropy(), run_eagerly=True)
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        calls, sent = [], []
        stop = counting(model, calls, sent)
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[Marks(calls)])
        stop()
        steps = in_steps(calls)
        traffic = [[c for c in steps.get(f"step {i}", []) if "bucket" in c] for i in range(6)]
        assert [bool(t) for t in traffic] == [False, False, True] * 2, (policy, steps)
        flags = [c for i in (1, 3, 4) for c in steps.get(f"step {i}", [])]
        assert all("finite" in c for c in flags) and (not flags or policy != "float32"), flags


@CHECKS
def r14_frozen_and_unused_layers(ring):
    """R14: variables without a gradient, on one optimizer, while others have one."""

    class Odd(keras.Model):
        def __init__(self):
            super().__init__()
            self.frozen, self.unused, self.head = L.Dense(8, trainable=False), L.Dense(3), L.Dense(4)
            for layer in (self.frozen, self.unused, self.head):
                layer.build((None, 8))

        def call(self, h):
            return self.head(self.frozen(h))

    model = alike(ring, Odd, lambda: O.SGD(0.1, global_clipnorm=0.1))
    (traffic,) = [t for r in model.__dict__["_tfdist"].reducers for t in r.traffic.values()]
    assert len(traffic.absent) in (0, 2)  # Keras filters them before the sum, or the ring is told
    assert traffic.dense_bytes == 4 * (8 * 4 + 4)


@CHECKS
def r15_no_xla(ring):
    """R15: `jit_compile=True` is refused; "auto" is off even where Keras would switch it on."""
    model = ring.strategy.distribute(dense())
    with pytest.raises(ValueError, match="jit_compile=True.*cannot be compiled by XLA"):
        model.compile("sgd", cross_entropy(), jit_compile=True)
    # On a CPU "auto" is off by itself: pretend to be on a GPU.
    kept, keras.Model._resolve_auto_jit_compile = keras.Model._resolve_auto_jit_compile, lambda model: True
    try:
        model.compile("sgd", cross_entropy())
        assert model.jit_compile is False
        before = dense()
        before.compile("sgd", cross_entropy())
        assert before.jit_compile is True
        assert ring.strategy.distribute(before).jit_compile is False
    finally:
        keras.Model._resolve_auto_jit_compile = kept


@CHECKS
def r16_statistics_of_unsynchronized_norm(ring):
    """R16: each rank keeps moving statistics of its own; after every epoch all have their mean."""
    x, y = data(64)
    x = x + np.arange(64, dtype="float32")[:, None]
    model = ring.strategy.distribute(
        keras.Sequential([keras.Input((8,)), L.BatchNormalization(momentum=0.7, name="norm"), L.Dense(4)])
    )
    model.compile(O.SGD(0.0), cross_entropy())
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    mean, variance = np.zeros(8), np.ones(8)
    for _epoch in range(2):
        ends = []
        for rank in range(2):
            m, v = mean, variance
            for step in range(4):
                part = x[16 * step + 8 * rank :][:8]
                m, v = 0.7 * m + 0.3 * part.mean(0), 0.7 * v + 0.3 * part.var(0)
            ends.append((m, v))
        mean, variance = np.mean([e[0] for e in ends], 0), np.mean([e[1] for e in ends], 0)
    norm = model.get_layer("norm")
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, rtol=1e-5)


@CHECKS
def r16_statistics_of_synchronized_norm(ring):
    """R16: synchronized: the moving statistics are those of one process, on every rank."""
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((8,)), L.BatchNormalization(momentum=0.7, synchronized=True), L.Dense(4)]
    )
    x, y = data(55)
    model = alike(ring, build, lambda: O.SGD(0.1), x=x, y=y, batch_size=16)
    told = ring.everywhere([w.tolist() for w in model.get_weights()])
    assert told[0] == told[1]


class AfterSteps(keras.callbacks.Callback):
    """Keeps all weights, flat, after each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(np.concatenate([w.ravel() for w in self.model.get_weights()]))


@CHECKS
def r11_infinity_on_one_rank(ring):
    """R11: mixed_float16, Inf on rank 1 only: both skip that step, and their loss scales stay equal."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(48)
    x[16 + 8 + 3] = np.inf  # step 1, the second half: rank 1's

    for accumulate in (None, 2):
        model = ring.strategy.distribute(dense())
        optimizer = O.LossScaleOptimizer(O.SGD(0.1, gradient_accumulation_steps=accumulate), initial_scale=1024.0)
        model.compile(optimizer, cross_entropy())
        note = AfterSteps()
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[note])
        weights = note.weights
        assert np.isfinite(weights).all()
        assert (weights[0] == weights[1]).all()
        if accumulate is None:
            assert (weights[1] != weights[2]).any()
            assert int(optimizer.inner_optimizer.iterations.numpy()) == 2
        assert float(optimizer.dynamic_scale.numpy()) == 512.0
        told = ring.everywhere((float(optimizer.dynamic_scale.numpy()), np.array(weights).tolist()))
        assert told[0] == told[1]


@CHECKS
def r21_zero_weights_on_rank_0(ring):
    """R21: sample_weight all zero on rank 0; class_weight with classes that one rank lacks."""
    x, y = data(50)
    weight = np.ones(50, "float32")
    for step in range(4):
        weight[16 * step :][:8] = 0
    for loss in (cross_entropy(), cross_entropy(reduction="mean_with_sample_weight")):
        alike(ring, dense, lambda: O.SGD(0.3), x=x, y=y, loss=loss, sample_weight=weight, batch_size=16)
    ordered = np.argsort(y, kind="stable")
    alike(ring, dense, lambda: O.SGD(0.3), x=x[ordered], y=y[ordered], class_weight={0: 0.0, 1: 5.0}, batch_size=16)


class Tap(L.Layer):
    """Notes what passes through."""

    def __init__(self):
        super().__init__()
        self.__dict__["seen"] = []

    def call(self, x, training=None):
        if not training:
            return x
        note = tf.numpy_function(lambda v: np.int32(self.__dict__["seen"].append(v) or 0), [x], tf.int32)
        with tf.control_dependencies([note]):
            return tf.identity(x)


@CHECKS
def r24_r25_masks_differ_and_weights_do_not(ring):
    """R24, R25: whatever the ranks' seeds, dropout masks differ between ranks and steps, initial weights do not."""
    for seed in (5, 5 + ring.rank):
        keras.utils.set_random_seed(seed)
        tap = Tap()
        model = ring.strategy.distribute(
            keras.Sequential([keras.Input((64,)), L.Dropout(0.5), tap, L.Dense(4, name="head")])
        )
        own = ring.everywhere(model.get_layer("head").kernel.numpy().tolist())
        model.compile(O.SGD(0.0), "mse")
        model.fit(np.ones((16, 64)), np.zeros((16, 4)), batch_size=8, verbose=0)
        after = ring.everywhere(model.get_layer("head").kernel.numpy().tolist())
        assert after[0] == after[1] == own[0]
        masks = ring.everywhere([m.tolist() for m in tap.__dict__["seen"]])
        assert len(masks[0]) == 2
        assert masks[0] != masks[1] and masks[0][0] != masks[0][1] and masks[1][0] != masks[1][1]
        assert masks[0][0][0] != masks[1][0][0]


test_steps = CHECKS.tests()
