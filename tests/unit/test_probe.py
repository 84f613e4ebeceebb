"""A custom train_step whose loss is a sum is found out, one whose loss is a mean passes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.trainers.probe import doubles, refuse_sum

SPEC = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.int32))


def custom(reduce):
    class Custom(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = reduce(tf.square(tf.one_hot(y, 2) - self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    layers = [keras.Input((3,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = tfdist.RingAllReduceStrategy().distribute(Custom(layers))
    model.compile("adam")
    return model


def step_of(model):
    return type(model).__mro__[2].train_step.__get__(model)


def test_a_mean_passes_and_leaves_no_trace():
    model = custom(tf.reduce_mean)
    before = model.get_weights()
    refuse_sum(model, step_of(model), SPEC, "mean")
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(model.optimizer.iterations) == 0


def test_a_sum_is_refused_unless_sums_are_asked_for():
    model = custom(tf.reduce_sum)
    with pytest.raises(ValueError, match="gradients of a sum over its batch"):
        refuse_sum(model, step_of(model), SPEC, "mean")
    refuse_sum(model, step_of(model), SPEC, "sum")


def test_a_step_that_needs_real_data_is_left_alone():
    model = custom(lambda error: tf.reduce_mean(error) / tf.reduce_min(tf.constant([])[0]))
    refuse_sum(model, step_of(model), SPEC, "mean")


@pytest.mark.parametrize(
    ("once", "twice", "answer"),
    [([1.0, 2], [2.0, 4], True), ([1.0, 2], [1.0, 2], False), ([0.0], [0.0], False), ([1.0], [float("nan")], False)],
)
def test_doubles(once, twice, answer):
    assert doubles(np.array(once), np.array(twice)) is answer
