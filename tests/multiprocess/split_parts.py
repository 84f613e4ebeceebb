"""What the checks of the model parallel strategy share: four logical CPUs, and comparison with plain Keras."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.multiprocess import split_models

CPUS = [f"/CPU:{i}" for i in range(4)]


def make_devices():
    """In a process where TensorFlow has not started yet."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(CPUS))


def pair(build, devices, optimizer=None, metrics=(), **options):
    """(split, plain) models that begin alike, and their data."""
    options.setdefault("balance", "parameters")  # the same cut each time
    models = []
    for split in (True, False):
        keras.utils.set_random_seed(3)
        split_models.random = np.random.default_rng(0)
        model, x, y, loss = build()
        if split:
            strategy = tfdist.ModelParallelStrategy(devices, **options)
            with strategy.scope():
                assert strategy.distribute(model) is model
        rule = optimizer() if optimizer else keras.optimizers.Adam(0.01)
        model.compile(rule, loss, metrics=list(metrics) or None, jit_compile=False)
        models.append(model)
    return *models, x, y


def assert_same(split, plain, rtol=2e-4, atol=2e-5):
    for ours, theirs in zip(split.variables, plain.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=rtol, atol=atol, err_msg=ours.path)
    for ours, theirs in zip(split.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=rtol, atol=atol, err_msg=ours.path)


def assert_logs(ours, theirs):
    assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


def refused(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
