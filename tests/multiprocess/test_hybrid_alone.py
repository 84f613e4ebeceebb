"""One process: the model parallel strategy's training."""

from __future__ import annotations

import keras
import numpy as np

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.hybrid_parts import SGD, assert_same, pair
from tests.multiprocess.split_parts import assert_logs, make_devices, refused

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)


@CHECKS
def it_trains_as_plain_keras(ring):
    for build, optimizer in ((split_models.skip, keras.optimizers.Adam), (split_models.masked, SGD)):
        split, plain, x, y = pair(build, optimizer=optimizer, microbatches=3)
        fit = {"batch_size": 15, "epochs": 2, "verbose": 0, "validation_split": 0.25}
        assert_logs(*(m.fit(x, y, shuffle=False, **fit).history for m in (split, plain)))
        assert_same(split, plain)
        np.testing.assert_allclose(
            split.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=2e-4, atol=2e-5
        )
        split.save(ring.path / "model.keras")
        loaded = keras.models.load_model(ring.path / "model.keras")
        assert type(loaded) is type(plain) and type(loaded.optimizer) is type(plain.optimizer)


@CHECKS
def it_says_who_has_what_and_lets_synchronized_norms_be(ring):
    strategy = tfdist.HybridStrategy(model_parallel=2)
    assert strategy.num_replicas_in_sync == 1
    assert [d[-5:] for d in strategy.devices] == ["CPU:0", "CPU:1"]
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(synchronized=True)])
    strategy.distribute(model).compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    refused(lambda: tfdist.HybridStrategy(model_parallel={"devices": 2, "stages": 2}), "known are 'devices', ")


test_hybrid_alone = CHECKS.tests()
