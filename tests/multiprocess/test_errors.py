"""What cannot be trained exactly ends with an error on every rank that says what was received and what to do."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

CHECKS = Checks(__name__)


def distributed(ring, model=None, optimizer="sgd", loss=None, **kwargs):
    model = ring.strategy.distribute(model or dense())
    model.compile(optimizer, loss or cross_entropy(), **kwargs)
    return model


@CHECKS
def r6_validation_on_rank_0_only(ring):
    """R6: an error on every rank, at once."""
    x, y = data(32)
    validation = (x[:8], y[:8]) if ring.rank == 0 else None
    with pytest.raises(ValueError, match="different validation_data on each rank: rank 0 .*8 samples; rank 1 .*none"):
        distributed(ring).fit(x, y, batch_size=16, verbose=0, validation_data=validation)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8) if ring.rank == 0 else None
    with pytest.raises(ValueError, match="different validation_data on each rank"):
        distributed(ring).fit(x, y, batch_size=16, verbose=0, validation_data=dataset)


@CHECKS
def different_arguments(ring):
    """Arguments of fit, evaluate and predict that differ between ranks."""
    x, y = data(32)
    model = distributed(ring)
    for wrong in (
        {"batch_size": 16 + ring.rank},
        {"epochs": 1 + ring.rank},
        {"steps_per_epoch": 1 + ring.rank},
    ):
        key = next(iter(wrong))
        with pytest.raises(ValueError, match=f"fit of 'sequential' was called with a different {key}"):
            model.fit(x, y, verbose=0, **wrong)
    with pytest.raises(ValueError, match="different x on each rank: rank 0 .*32 samples; rank 1 .*31 samples"):
        model.fit(x[ring.rank :], y[ring.rank :], batch_size=16, verbose=0)
    with pytest.raises(ValueError, match="evaluate of .* different x"):
        model.evaluate(x[ring.rank :], y[ring.rank :], verbose=0)
    with pytest.raises(ValueError, match="predict of .* different gather"):
        model.predict(x, verbose=0, gather=ring.rank == 0)


@CHECKS
def r19_different_models(ring):
    """R19: Dense(4) on one rank, Dense(5) on the other; different layers; different optimizers."""
    x, y = data(32)

    def fit(model, optimizer="sgd"):
        distributed(ring, model, optimizer).fit(x, y, batch_size=16, verbose=0)

    wide = keras.Sequential([keras.Input((8,)), L.Dense(4 + ring.rank, name="out")])
    with pytest.raises(ValueError) as error:
        fit(wide)
    for part in ("out/kernel", "float32[8, 4]", "float32[8, 5]", "rank 0", "rank 1"):
        assert part in str(error.value), error.value
    deep = keras.Sequential([keras.Input((8,)), *[L.Dense(4) for _ in range(1 + ring.rank)]])
    with pytest.raises(ValueError, match="(?s)rank 0.*rank 1"):
        fit(deep)
    with pytest.raises(ValueError, match="(?s)rank 0.*rank 1"):
        fit(dense(), ("sgd", "adam")[ring.rank])
    with pytest.raises(ValueError, match="float16|dtype|float32"):
        fit(keras.Sequential([keras.Input((8,)), L.Dense(4, dtype=("float32", "float64")[ring.rank])]))


@CHECKS
def models_numbered_differently(ring):
    """Automatic names count what a process has built: no difference that matters."""
    if ring.rank == 1:
        dense(), dense()
    x, y = data(32)
    optimizer = keras.optimizers.Adam()
    model = distributed(ring, optimizer=optimizer, metrics=["accuracy"])
    model.fit(x, y, batch_size=16, verbose=0, validation_split=0.5)
    assert len({len(h) for h in ring.everywhere(model.history.history)}) == 1


@CHECKS
def not_distributed(ring):
    """A model compiled under the scope that nobody distributed: fit, evaluate and predict give the line to add."""
    x, y = data(32)
    with ring.strategy.scope():
        model = dense()
        model.compile("sgd", cross_entropy())
    calls = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
    }
    silent = []
    for name, call in calls.items():
        try:
            call()
            silent.append(name)
        except ValueError as error:
            assert re.search(r"not distributed.*`model = strategy.distribute\(model\)`", str(error)), (name, error)
    assert silent == [], silent


@CHECKS
def no_optimizer_applied(ring):
    """A train_step that updates by hand, or by an optimizer that the model does not know."""

    class ByHand(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for g, v in zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True):
                v.assign_sub(0.1 * g)
            return {"loss": loss}

    x, y = data(32)
    model = distributed(ring, ByHand([keras.Input((8,)), L.Dense(4)]))
    with pytest.raises(ValueError, match="applied no optimizer of the model"):
        model.fit(x, y, batch_size=16, verbose=0)


class Unscaled(keras.Sequential):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@CHECKS
def unscaled_loss_with_synchronized_norm(ring):
    """The combination that stays inexact is refused by name, at the batch where it would begin to be wrong."""
    x, y = data(39)
    build = lambda: Unscaled(  # noqa: E731
        [keras.Input((8,)), L.BatchNormalization(synchronized=True), L.Dense(4)], name="own"
    )
    distributed(ring, build()).fit(x[:32], y[:32], batch_size=16, verbose=0)  # even shares are exact
    refusal = r"'own'.*BatchNormalization\(synchronized=True\).*optimizer.scale_loss\(loss\)"
    with pytest.raises(ValueError, match=refusal):
        distributed(ring, build()).fit(x, y, batch_size=16, verbose=0)


@CHECKS
def what_distribute_takes(ring):
    """A model, or a function that builds one in the scope; one strategy only."""
    import tfdist

    built = ring.strategy.distribute(lambda: dense())
    assert isinstance(built, keras.Sequential) and ring.strategy.distribute(built) is built
    with pytest.raises(ValueError, match="distributed by another strategy"):
        tfdist.RingAllReduceStrategy().distribute(built)
    with pytest.raises(ValueError, match="returned int, not a keras.Model"):
        ring.strategy.distribute(lambda: 3)
    with pytest.raises(ValueError, match="received list; expected a keras.Model"):
        ring.strategy.distribute([dense()])


@CHECKS
def errors_leave_the_ring_usable(ring):
    """After all these errors a fit works, and the ranks are in step."""
    x, y = data(32)
    model = distributed(ring)
    model.fit(x, y, batch_size=16, verbose=0)
    told = ring.everywhere([w.tolist() for w in model.get_weights()])
    assert told[0] == told[1] and np.isfinite(model.get_weights()[0]).all()


test_errors = CHECKS.tests()
