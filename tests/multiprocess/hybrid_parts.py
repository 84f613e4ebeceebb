"""What the checks of the hybrid strategy share: a split model on a ring beside plain Keras on the joined batch."""

from __future__ import annotations

import keras
import numpy as np

import tfdist
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import assert_logs

SGD = keras.optimizers.SGD


def hybrid(devices=2, ring=None, **options):
    """A strategy of small buckets, so that there are several."""
    options.setdefault("balance", "parameters")
    return tfdist.HybridStrategy(
        model_parallel={"devices": devices, **options}, ring={"bucket_mb": 0.001, **(ring or {})}
    )


def pair(build, optimizer=None, metrics=(), strategy=None, **options):
    """(split over devices and ranks, plain) models that begin alike, and their data."""
    strategy = strategy or hybrid(**options)
    models = []
    for distributed in (True, False):
        keras.utils.set_random_seed(3)
        split_models.random = np.random.default_rng(0)
        model, x, y, loss = build()
        if distributed:
            with strategy.scope():
                assert strategy.distribute(model) is model
        rule = optimizer() if optimizer else keras.optimizers.Adam(0.01)
        model.compile(rule, loss, metrics=list(metrics) or None, jit_compile=False)
        models.append(model)
    return *models, x, y


def same_everywhere(ring, value):
    everybody = ring.everywhere(value)
    assert all(v == everybody[0] for v in everybody), everybody
    return value


def state_of(model):
    """(path, value) of weights and slots, without seeds: those differ between ranks."""
    variables = (*model.variables, *model.optimizer.variables)
    return [(v.path, v.numpy()) for v in variables if "seed" not in v.path]


def assert_same(split, plain, tolerance=2e-4):
    for (path, ours), (_, theirs) in zip(state_of(split), state_of(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=0.1 * tolerance, err_msg=path)


def alike(ring, build, fit, **options):
    """Fits a split and a plain model; the same logs and state, on both ranks too. Returns them and the data."""
    split, plain, x, y = pair(build, **options)
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    logs = [m.fit(x, y, **fit).history for m in (split, plain)]
    assert_logs(*logs)
    assert_same(split, plain)
    same_everywhere(ring, (logs[0], bits_of(split)))
    return split, plain, x, y


def bits_of(model):
    return [value.tobytes() for _, value in state_of(model)]
