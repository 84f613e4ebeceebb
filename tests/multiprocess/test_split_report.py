"""The report of a model over several devices: what is counted, timed and measured, against the outside."""

from __future__ import annotations

import statistics
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, make_devices, pair, refused

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers


class Clock(keras.callbacks.Callback):
    """Seconds between the beginnings of batches, but for those that are the first of an epoch, or trace."""

    def __init__(self):
        super().__init__()
        self.starts, self.gaps, self.calls = [], [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.starts = []

    def on_train_batch_begin(self, batch, logs=None):
        self.starts.append(time.perf_counter())
        if len(self.starts) > 1 and self.calls > 1:
            self.gaps.append(self.starts[-1] - self.starts[-2])
        self.calls += 1

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.2)  # which no step takes


@CHECKS
def the_measured_step_is_that_of_a_clock_outside(ring):
    strategy = tfdist.ModelParallelStrategy(CPUS[:2], balance="parameters", microbatches=2)
    model = keras.Sequential([keras.Input((256,)), *[L.Dense(256, "relu") for _ in range(4)], L.Dense(3)])
    strategy.distribute(model).compile("adam", split_models.SPARSE(from_logits=True), steps_per_execution=2)
    assert strategy.report(model).measured is None
    x, y = np.ones((64 * 16 + 8, 256), "f4"), np.zeros(64 * 16 + 8, "i4")
    clock = Clock()
    model.fit(x, y, batch_size=64, epochs=3, verbose=0, callbacks=[clock])
    measured = strategy.report(model).measured
    assert (measured.batch, measured.steps) == (64, 2 * len(clock.gaps)), (measured, len(clock.gaps))
    assert measured.seconds == pytest.approx(statistics.median(clock.gaps) / 2, rel=0.05)
    report = strategy.report(model)
    assert report.setting.batch == 64
    assert report.measured_samples_per_s == pytest.approx(64 / measured.seconds)
    busy = 2 * sum(stage.forward + stage.backward for stage in report.stages)
    assert report.measured_bubble == pytest.approx(1 - busy / (2 * measured.seconds))
    model.fit(x[:128], y[:128], batch_size=32, verbose=0)
    assert strategy.report(model).measured.batch == 32
    model.fit(x[:128], y[:128], batch_size=64, verbose=0)
    short = strategy.report(model)  # two steps, one call: no time between starts
    assert (short.measured, short.setting.batch) == (None, 64)
    assert strategy.report(model, batch_size=10).setting.batch == 10


@CHECKS
def measuring_changes_nothing_of_training(ring):
    split, plain, x, y = pair(split_models.skip, CPUS[:2], microbatches=4)
    split.distribute_strategy.report(split)
    logs = []
    for model in (split, plain):
        logs.append(model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history)
        if model is split:
            split.distribute_strategy.report(split)
        logs.append(model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history)
    assert_logs(logs[0], logs[2])
    assert_logs(logs[1], logs[3])
    assert_same(split, plain)
    assert split.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-3)


@CHECKS
def bytes_and_parameters_are_those_of_the_model(ring):
    for optimizer, slots in (("adam", 2), (keras.optimizers.SGD(momentum=0.9), 1), ("sgd", 0)):
        strategy = tfdist.ModelParallelStrategy(CPUS[:3], balance=[2, 2, 1], microbatches=4)
        model, x, y, loss = split_models.sequential()
        model.layers[0].trainable = False
        assumed = strategy.report(model)
        assert dict(assumed.setting.sources)["slots"].startswith("2 for each trained weight, assumed")
        strategy.distribute(model).compile(optimizer, loss)
        model.fit(x, y, batch_size=20, verbose=0)
        report = strategy.report(model)
        assert dict(report.setting.sources)["slots"] == "those of the optimizer"
        dense, out = 12 * 12 + 12, 12 * 3 + 3
        parameters = [2 * dense, 2 * dense, out]
        assert [s.held.parameters for s in report.stages] == parameters
        assert sum(parameters) == model.count_params()
        assert [s.held.weights for s in report.stages] == [4 * n for n in parameters]
        trained = [4 * dense, 8 * dense, 4 * out]
        assert [s.held.gradients for s in report.stages] == trained
        assert [s.held.slots for s in report.stages] == [slots * n for n in trained]
        assert [s.held.slots for s in assumed.stages] == [2 * n for n in trained]
        # Micro-batches of 5 samples, 12 numbers of each a layer; 3, 2 and 1 of them under 1f1b.
        assert [s.kept_bytes for s in report.stages] == [2 * 240, 2 * 240, 5 * 3 * 4]
        assert [s.live for s in report.stages] == [3, 2, 1]
        assert [s.arriving for s in report.stages] == [(), ((0, 240),), ((1, 240),)]
        assert report.setting.devices == ("CPU:0", "CPU:1", "CPU:2")
    with_scale = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())
    split, _, x, y = pair(split_models.sequential, CPUS[:2], lambda: with_scale, microbatches=2)
    split.fit(x, y, verbose=0)
    report = split.distribute_strategy.report(split)
    assert sum(s.held.slots for s in report.stages) == 2 * sum(s.held.gradients for s in report.stages)


@CHECKS
def every_kind_of_model_can_be_timed_before_and_after_it_is_distributed(ring):
    for build in split_models.ALL:
        strategy = tfdist.ModelParallelStrategy(CPUS[:2], balance="parameters", microbatches=2)
        model, _, _, _ = build()
        before = model.get_weights()
        first = strategy.report(model)
        assert type(model).__mro__[0].__module__.startswith("keras.")  # not distributed by that
        strategy.distribute(model)
        second = strategy.report(model)
        for one, other in zip(first.stages, second.stages, strict=True):
            assert one.operations == other.operations, build
            assert one.arriving == other.arriving, build
        for report in (first, second):
            assert [name for s in report.stages for name in s.operations] == [*strategy.plan(model).mapping()]
            assert sum(s.forward for s in report.stages) > 0, build
            assert sum(s.backward for s in report.stages) > 0, build
            assert 0 <= report.bubble < 1
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)


@CHECKS
def times_follow_the_work(ring):
    """A layer of 64 times the products takes much longer than others, forwards and backwards."""
    wide = [L.Dense(2048, name="in"), L.Dense(2048, name="heavy"), L.Dense(32, name="narrows"), L.Dense(3, name="out")]
    model = keras.Sequential([keras.Input((32,)), *wide])
    strategy = tfdist.ModelParallelStrategy(CPUS, balance=[1, 1, 1, 1], microbatches=4, batch_size=256)
    for _ in range(2):
        first, heavy, narrows, last = strategy.report(model).stages
        for other in (first, narrows, last):
            assert heavy.forward > 3 * other.forward, (heavy, other)
            assert heavy.backward > 3 * other.backward, (heavy, other)
        strategy.distribute(model)
    # A product of 64 x 2048 x 2048 by TensorFlow alone.
    a, b = keras.ops.ones((64, 2048)), keras.ops.ones((2048, 2048))
    spent = []
    for _ in range(9):
        began = time.perf_counter()
        keras.ops.matmul(a, b)[:1].numpy()
        spent.append(time.perf_counter() - began)
    assert 0.2 < heavy.forward / statistics.median(spent) < 5, (heavy.forward, spent)


@CHECKS
def times_are_taken_once(ring):
    model, _, _, _ = split_models.sequential()
    strategy = tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2)  # by time
    strategy.distribute(model)
    first, second = strategy.report(model), strategy.report(model)
    assert [s.forward for s in first.stages] == [s.forward for s in second.stages]
    other = strategy.report(model, batch_size=20)
    assert [s.forward for s in other.stages] != [s.forward for s in first.stages]


@CHECKS
def what_is_recomputed_is_said(ring):
    strategy = tfdist.ModelParallelStrategy(CPUS[:2], balance=[3, 2], microbatches=2, recompute=True)
    model, _, _, _ = split_models.sequential()
    report = strategy.report(model, batch_size=40)
    first, last = report.stages
    assert (first.again, last.again) == (True, False)
    # Nothing comes into the first stage but the model's input; one micro-batch's outputs are there in its backward.
    assert (first.activations, last.activations) == (3 * 20 * 12 * 4, 20 * 12 * 4 + 20 * 3 * 4)
    within = tfdist.ModelParallelStrategy(CPUS[:2], balance="parameters", microbatches=2, memory=1e6)
    assert within.report(model, batch_size=40).setting.memory == 1e6
    report.timeline(ring.path / "step.png")
    assert (ring.path / "step.png").read_bytes().startswith(b"\x89PNG")


@CHECKS
def what_has_no_plan_is_refused(ring):
    class Own(keras.Model):
        def call(self, x):
            return x

    strategy = tfdist.ModelParallelStrategy(CPUS[:2])
    refused(lambda: strategy.report(Own()), "with a call() of its own")
    model, _, _, _ = split_models.sequential()
    refused(lambda: strategy.report(model, batch_size=0), "batch_size is 0, expected a number of at least 1, or None")

    class Fails(L.Layer):
        def compute_output_shape(self, shape):
            return shape

        def call(self, x):
            if x.shape[0] is not None:
                raise RuntimeError("no luck")
            return x

    broken = keras.Sequential([keras.Input((4,)), Fails(name="fails"), L.Dense(3)])
    refused(lambda: strategy.report(broken), "layer 'fails' could not be timed on made-up input of 32 samples")

    class Checks(L.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_greater(x, 1e9, "no such data")]):
                return tf.identity(x)

    picky = keras.Sequential([keras.Input((4,)), Checks(), L.Dense(3)], name="picky")
    refused(lambda: strategy.report(picky), "model 'picky' could not be timed on made-up input of 32 samples (")


test_split_report = CHECKS.tests()
