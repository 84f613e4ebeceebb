"""The private names of TensorFlow and Keras that tfdist leans on are there."""

import keras
import numpy as np
import tensorflow as tf

from tfdist import private


def test_every_name_is_there():
    assert private.check() == []


def test_missing_names_are_told(monkeypatch):
    monkeypatch.setitem(private.NAMES, "keras.src.backend", ("no_such_name",))
    monkeypatch.setitem(private.METHODS, "keras.Model", ("no_such_method",))
    assert private.check() == ["keras.src.backend.no_such_name", "keras.Model.no_such_method"]


def test_what_counts_as_arrays():
    x = np.zeros((3, 2))
    assert private.is_arrays(x, [x, x], None) and private.is_arrays({"a": tf.constant(x)})
    assert not private.is_arrays(tf.data.Dataset.range(3))
    assert not private.is_arrays(i for i in range(3))


def test_global_seed():
    kept = private.global_seed()
    try:
        tf.random.set_seed(11)
        assert private.global_seed() == 11
    finally:
        tf.random.set_seed(kept)


def test_validation_split_is_that_of_keras():
    x, y = np.arange(10.0), np.arange(10)
    (train, _, none), (valid, targets, _) = private.validation_split((x, y, None), 0.3)
    assert none is None and len(train) == 7
    np.testing.assert_array_equal(valid, x[7:])
    np.testing.assert_array_equal(targets, y[7:])


def test_layers_of_a_nested_model():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="deep")])
    model = keras.Sequential([keras.Input((2,)), inner])
    assert "deep" in [layer.name for layer in private.layers_of(model)]
