"""A model over several devices trains as the unsplit one does."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, make_devices, pair

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)


@CHECKS
def parity_of_every_model(ring):
    """Batches of 16 and a short one of 8, two epochs; weights, slots, logs, evaluate and predict."""
    for build in split_models.ALL:
        for schedule in ("1f1b", "gpipe"):
            split, plain, x, y = pair(build, CPUS[:3], microbatches=4, schedule=schedule)
            logs = [m.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history for m in (split, plain)]
            try:
                assert_logs(*logs)
                assert_same(split, plain)
                np.testing.assert_allclose(
                    split.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=2e-4, atol=2e-5
                )
                for ours, theirs in zip(
                    *(keras.tree.flatten(m.predict(x, verbose=0)) for m in (split, plain)), strict=True
                ):
                    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
            except AssertionError as error:
                raise AssertionError(f"{build.__name__}, {schedule}: {error}") from error


@CHECKS
def batches_of_any_length_weights_and_optimizers(ring):
    """M6: 10 samples in 4 micro-batches, fewer samples than micro-batches, weights of samples and classes."""
    weights = np.random.default_rng(5).random(split_models.SAMPLES).astype("float32")
    cases = [
        ({"batch_size": 10}, {}),
        ({"batch_size": 19}, {}),  # ends with 2 samples
        ({"batch_size": 16, "sample_weight": weights}, {}),
        ({"batch_size": 16, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, {}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.AdamW(0.01, use_ema=True)}),
        (
            {"batch_size": 16},
            {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)},
        ),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))}),
    ]
    for schedule in ("1f1b", "gpipe"):
        for fit, options in cases:
            split, plain, x, y = pair(
                split_models.skip, CPUS[:2], microbatches=4, schedule=schedule, metrics=["accuracy"], **options
            )
            logs = [m.fit(x, y, epochs=2, shuffle=False, verbose=0, **fit).history for m in (split, plain)]
            assert_logs(*logs)
            assert_same(split, plain)


@CHECKS
def normalization_goes_by_micro_batch_and_its_averages_move_once(ring):
    """The oracle: numpy on the same micro-batches."""

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(6), layers.BatchNormalization(momentum=0.9), layers.Dense(3)]
        )
        return model, split_models.rows(6), split_models.classes(), split_models.SPARSE(from_logits=True)

    for schedule in ("1f1b", "gpipe"):
        split, _, x, y = pair(build, CPUS[:2], balance=[1, 2], microbatches=3, schedule=schedule)
        kernel, bias = split.layers[0].get_weights()
        split.fit(x, y, batch_size=40, shuffle=False, verbose=0)
        parts = np.split(x @ kernel + bias, [13, 26])  # 13, 13 and 14 samples
        mean, variance = (sum(len(p) * f(p, axis=0) for p in parts) / 40 for f in (np.mean, np.var))
        _, _, moving_mean, moving_variance = split.layers[1].get_weights()
        np.testing.assert_allclose(moving_mean, 0.1 * mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(moving_variance, 0.9 + 0.1 * variance, rtol=1e-4)


@CHECKS
def dropout_does_not_depend_on_the_cut(ring):
    def build():
        layers = keras.layers
        dropped = [part for _ in range(3) for part in (layers.Dense(12, "relu"), layers.Dropout(0.5))]
        model = keras.Sequential([keras.Input((12,)), *dropped, layers.Dense(3, "softmax")])
        return model, split_models.rows(), split_models.classes(), split_models.SPARSE()

    results = []
    for devices in (2, 3, 4):
        for schedule in ("1f1b", "gpipe"):
            split, _, x, y = pair(build, CPUS[:devices], microbatches=4, schedule=schedule)
            split.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
            results.append(split)
    for other in results[1:]:
        assert_same(results[0], other)
    masks = [v for v in results[0].non_trainable_variables if "seed" in v.path]
    assert all(int(m.numpy()[1]) == 2 * 2 * 4 for m in masks), [m.numpy() for m in masks]


@CHECKS
def files_are_plain_and_callbacks_work(ring):
    split, _, x, y = pair(split_models.skip, CPUS[:2], microbatches=2, metrics=["accuracy"])
    path = ring.path / "model.keras"
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
    split.fit(x, y, validation_split=0.25, epochs=5, verbose=0, callbacks=[stop])
    assert stop.stopped_epoch == 1
    split.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded) is keras.Model or type(loaded).__module__.startswith("keras.")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), split.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert [layer.output.shape for layer in split.layers[1:]], "layers have one output each"


@CHECKS
def what_was_trained_before_goes_on(ring):
    """A model that was compiled and fitted, its slots with it, and its loss scale."""
    for rule in (keras.optimizers.Adam, lambda r: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(r))):
        models = []
        for distributed in (True, False):
            keras.utils.set_random_seed(3)
            split_models.random = np.random.default_rng(0)
            model, x, y, loss = split_models.skip()
            model.compile(rule(0.01), loss, jit_compile=False)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            if distributed:
                tfdist.ModelParallelStrategy(CPUS[:3], balance="parameters", microbatches=4).distribute(model)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            models.append(model)
        assert_same(*models)


@CHECKS
def images_in_batches_smaller_than_the_micro_batches(ring):
    """Kernels that take no empty batch; sizes known and unknown to the graph."""

    def build():
        layers = keras.layers
        first = keras.Input((6, 6, 2))
        a = layers.Conv2D(4, 3, activation="relu", padding="same")(first)
        b = layers.MaxPooling2D()(layers.SeparableConv2D(4, 3, padding="same", activation="relu")(a))
        out = layers.Dense(3)(layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(b)))
        x = np.random.default_rng(1).normal(size=(11, 6, 6, 2)).astype("float32")
        return keras.Model(first, out), x, split_models.classes()[:11], split_models.SPARSE(from_logits=True)

    for schedule in ("1f1b", "gpipe"):
        for size in (8, 2):  # 8 and 3 samples in 4 micro-batches, or 2 at a time
            split, plain, x, y = pair(build, CPUS[:2], microbatches=4, schedule=schedule, metrics=["accuracy"])
            pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=size == 2)
            logs = [m.fit(pipeline, epochs=2, verbose=0).history for m in (split, plain)]
            assert_logs(*logs)
            assert_same(split, plain)


test_split = CHECKS.tests()
