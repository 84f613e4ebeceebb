"""Ranks that do not mean the same data or do not stay the same: an error, or rank 0's way, never silence."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

CHECKS = Checks(__name__)


def model_of(ring, optimizer="sgd"):
    keras.utils.set_random_seed(3)
    model = ring.strategy.distribute(dense())
    model.compile(optimizer, cross_entropy())
    return model


@CHECKS
def arrays_cut_by_hand(ring):
    """The habit from Horovod: each rank passes its part. Half of the data would never be seen."""
    x, y = data(96)
    mine = slice(ring.rank, None, ring.size)
    with pytest.raises(ValueError, match=r"different x's rows \(pass all of them on all ranks: tfdist cuts\)"):
        model_of(ring).fit(x[mine], y[mine], batch_size=16, verbose=0)


@CHECKS
def labels_in_another_order(ring):
    """Small integer labels are told apart too."""
    x, y = data(128)
    order = np.random.default_rng(ring.rank).permutation(128)
    batches = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(32)
    with pytest.raises(ValueError, match="different global batches"):
        model_of(ring).fit(batches, epochs=2, verbose=0)


@CHECKS
def generators_that_draw_by_themselves(ring):
    x, y = data(128)

    def batches():
        rng = np.random.default_rng(ring.rank)
        while True:
            rows = rng.integers(0, 128, 32)
            yield x[rows], y[rows]

    with pytest.raises(ValueError, match="different global batches"):
        model_of(ring).fit(batches(), steps_per_epoch=8, verbose=0)


@CHECKS
def generators_of_different_length(ring):
    x, y = data(32)

    def batches():
        for _ in range(5 + ring.rank):
            yield x, y

    with pytest.raises(ValueError, match="input of 1 of 2 ranks ended before that of the others"):
        model_of(ring).fit(batches(), verbose=0)


@CHECKS
def own_batches_of_known_but_different_number(ring):
    """auto_shard_policy OFF over datasets that know their length, 6 and 5 batches: every sample once."""
    x, y = data(101)
    mine = tf.data.Dataset.from_tensor_slices((x[ring.rank :: 2], y[ring.rank :: 2])).batch(10)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    model = model_of(ring, keras.optimizers.SGD(0.1))
    history = model.fit(mine.with_options(options), epochs=2, verbose=0, validation_data=mine.with_options(options))
    assert int(model.optimizer.iterations) == 12
    assert np.isfinite(history.history["loss"]).all()
    together = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], together, rtol=1e-5)


@CHECKS
def a_learning_rate_of_each_rank(ring):
    """A callback that goes by a rank's own numbers: at the end of the epoch all have rank 0's weights again."""

    class Own(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 * (1 + ring.rank)

    x, y = data(96)
    model = model_of(ring, keras.optimizers.SGD(0.1))
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[Own()])
    sums = ring.everywhere([float(np.abs(w).sum()) for w in model.get_weights()])
    assert sums[0] == sums[1]


test_differences = CHECKS.tests()
