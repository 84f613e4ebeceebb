"""What else happens in a fit of two ranks with a split model each: statistics, masks, loss scales, files."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.hybrid_parts import SGD, assert_same, bits_of, hybrid, pair, same_everywhere
from tests.multiprocess.split_parts import assert_logs, make_devices
from tfdist.data.shares import bounds

CHECKS = Checks(__name__, prepare=make_devices)
SPARSE = split_models.SPARSE


@CHECKS
def statistics_are_those_of_each_ranks_micro_batches(ring):
    """BatchNormalization: numpy on the same micro-batches; once a batch, and the ranks' mean after the epoch."""

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(6), layers.BatchNormalization(momentum=0.9), layers.Dense(3)]
        )
        return model, split_models.rows(6), split_models.classes(), SPARSE(from_logits=True)

    for schedule in ("1f1b", "gpipe"):
        split, _, x, y = pair(build, balance=[1, 2], microbatches=3, schedule=schedule)
        kernel, bias = split.layers[0].get_weights()
        x, y = x[:39], y[:39]
        split.fit(x, y, batch_size=39, shuffle=False, verbose=0)
        ends = []
        for low, high in ((0, 19), (19, 39)):
            count = high - low
            cuts = [bounds(count, i, 3) for i in range(3)]
            parts = [x[low + a : low + b] @ kernel + bias for a, b in cuts]
            ends.append([sum(len(p) * f(p, axis=0) for p in parts) / count for f in (np.mean, np.var)])
        mean, variance = np.mean(ends, axis=0)
        _, _, moving_mean, moving_variance = split.layers[1].get_weights()
        np.testing.assert_allclose(moving_mean, 0.1 * mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(moving_variance, 0.9 + 0.1 * variance, rtol=1e-4)


@CHECKS
def dropout_goes_on_from_micro_batch_to_micro_batch_and_differs_between_ranks(ring):
    layers = keras.layers
    model = keras.Sequential([keras.Input((12,)), layers.Dense(12), layers.Dropout(0.5), layers.Dense(3)])
    with (strategy := hybrid(microbatches=4)).scope():
        strategy.distribute(model).compile("sgd", SPARSE(from_logits=True))
    x, y = split_models.rows(), split_models.classes()
    model.fit(x, y, batch_size=20, epochs=2, verbose=0)
    (seed,) = [v.numpy().tolist() for v in model.non_trainable_variables if "seed" in v.path]
    one, other = ring.everywhere(seed)
    assert one[0] != other[0] and one[1] == other[1] == 2 * 2 * 4
    same_everywhere(ring, [w.tobytes() for w in model.get_weights()])


@CHECKS
def an_infinity_on_one_rank(ring):
    """Both ranks skip that step, and their loss scales stay equal."""
    keras.config.set_dtype_policy("mixed_float16")
    split, _, x, y = pair(
        split_models.skip,
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=1024.0),
        microbatches=2,
    )
    x[16 + 8 + 3] = np.inf  # step 1, rank 1
    split.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert int(split.optimizer.inner_optimizer.iterations.numpy()) == 2
    assert float(split.optimizer.dynamic_scale.numpy()) == 512.0
    assert np.isfinite(np.concatenate([w.ravel() for w in split.get_weights()])).all()
    same_everywhere(ring, bits_of(split))


@CHECKS
def compression_and_sums(ring):
    """The ring's own options."""
    split, plain, x, y = pair(split_models.skip, ring={"compression": "fp16"}, microbatches=2)
    for m in (split, plain):
        m.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert_same(split, plain, tolerance=0.05)
    same_everywhere(ring, bits_of(split))
    split, plain, x, y = pair(
        split_models.skip, ring={"reduce_op": "sum"}, optimizer=lambda: SGD(0.01), microbatches=2
    )
    plain.optimizer.learning_rate = 0.02  # two ranks' means of equal shares
    for m in (split, plain):
        m.fit(x, y, batch_size=20, shuffle=False, verbose=0)
    for ours, theirs in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@CHECKS
def datasets_single_batches_and_eager_steps(ring):
    split, plain, x, y = pair(split_models.skip, microbatches=3, metrics=["accuracy"])
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(15)
    logs = [m.fit(pipeline, validation_data=pipeline, epochs=2, verbose=0).history for m in (split, plain)]
    assert_logs(*logs)
    told = [m.train_on_batch(x[:7], y[:7], return_dict=True) for m in (split, plain)]
    assert_logs(*told)
    np.testing.assert_allclose(split.predict_on_batch(x), plain.predict_on_batch(x), rtol=2e-4, atol=2e-5)
    for m in (split, plain):
        m.run_eagerly = True
        m.fit(x, y, batch_size=20, shuffle=False, verbose=0)
    assert_same(split, plain)
    same_everywhere(ring, bits_of(split))


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@CHECKS
def files_are_plain_and_a_job_goes_on(ring):
    """ModelCheckpoint, save and BackupAndRestore on all ranks: one writer; the end is that without a break."""
    callbacks = keras.callbacks
    split, plain, x, y = pair(split_models.skip, microbatches=2, metrics=["accuracy"])
    fit = {"batch_size": 16, "epochs": 4, "shuffle": False, "verbose": 0}
    plain.fit(x, y, **fit)
    best = callbacks.ModelCheckpoint(str(ring.path / "best.keras"), monitor="loss", save_best_only=True)
    with pytest.raises(InterruptedError):
        split.fit(x, y, **fit, callbacks=[best, callbacks.BackupAndRestore(str(ring.path / "backup")), Stop()])
    ring.everywhere(None)
    again, _, _, _ = pair(split_models.skip, microbatches=2, metrics=["accuracy"])
    history = again.fit(x, y, **fit, callbacks=[callbacks.BackupAndRestore(str(ring.path / "backup"))])
    assert same_everywhere(ring, history.epoch) == [2, 3]
    assert_same(again, plain)
    again.save(ring.path / "model.keras")
    ring.everywhere(None)
    for name in ("best.keras", "model.keras"):
        loaded = keras.models.load_model(ring.path / name)
        assert type(loaded).__module__.startswith("keras.") and type(loaded.optimizer) is keras.optimizers.Adam
    np.testing.assert_allclose(loaded.predict(x, verbose=0), again.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    # And on from the file, cut into three.
    with (strategy := hybrid(3)).scope():
        strategy.distribute(loaded)
    for m in (loaded, plain):
        m.fit(x, y, **fit)
    assert_same(loaded, plain)


test_hybrid_fit = CHECKS.tests()
