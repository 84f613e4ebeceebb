"""The private names of TensorFlow and Keras that tfdist leans on are there."""

import keras
import numpy as np
import tensorflow as tf

from tfdist import private, private_variables


def test_every_name_is_there():
    assert private.check() == []


def test_a_variable_and_an_optimizer_keep_what_private_variables_changes():
    variable = keras.Variable(np.zeros((2, 3), "float32"), name="kernel")
    assert {"_value", "_shape", "_ndim", "_path"} <= vars(variable).keys()
    assert private_variables.held_by(variable) is variable.value
    optimizer = keras.optimizers.Adam()
    optimizer.build([variable])
    assert vars(optimizer)["_trainable_variables"][0] is variable
    chosen, listed = optimizer._tracker.config["variables"]
    assert chosen(variable) and [id(v) for v in listed] == [id(v) for v in optimizer.variables]
    assert optimizer._var_key(variable) in optimizer._trainable_variables_indices
    unlisted = optimizer.variables[:2]
    private_variables.list_variables(optimizer, unlisted)
    assert optimizer.variables == unlisted
    optimizer.set_weights([np.array(7), np.array(0.5)])
    assert int(optimizer.iterations) == 7


def test_a_variable_moves_with_its_full_name_and_number():
    model = keras.Sequential([keras.Input((2,), name="i"), keras.layers.Dense(2, name="deep")])
    kernel = model.layers[0].kernel
    before, value = kernel.value, kernel.numpy()
    private_variables.place(kernel, "/CPU:0")
    assert kernel.value is not before and kernel.value.name == before.name and "deep/kernel" in before.name
    assert kernel.value._unique_id == before._unique_id and kernel.value.trainable
    np.testing.assert_array_equal(kernel.numpy(), value)


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
