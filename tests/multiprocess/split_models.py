"""Models that a cut has to deal with, and their data; all small, with 40 samples."""

from __future__ import annotations

import keras
import numpy as np

SAMPLES = 40
L = keras.layers
random = np.random.default_rng(0)
SPARSE = keras.losses.SparseCategoricalCrossentropy


def rows(columns=12):
    return random.normal(size=(SAMPLES, columns)).astype("float32")


def classes(*shape):
    return random.integers(0, 3, (SAMPLES, *shape)).astype("int32")


def sequential():
    hidden = [L.Dense(12, "tanh", name=f"hidden{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((12,)), *hidden, L.Dense(3, "softmax")])
    return model, rows(), classes(), SPARSE()


def skip():
    """A skip over every cut."""
    first = keras.Input((12,))
    a = L.Dense(12, "relu")(first)
    b = L.Dense(12, "relu")(a)
    c = L.Dense(12, "relu")(L.Add()([a, b]))
    d = L.Dense(12, "relu")(c)
    out = L.Dense(3)(L.Add()([d, a, first]))
    return keras.Model(first, out), rows(), classes(), SPARSE(from_logits=True)


def two_ends():
    """Two inputs by name, two outputs, one of them from an early stage; losses weighed."""
    left, right = keras.Input((12,), name="left"), keras.Input((6,), name="right")
    a = L.Dense(8, "tanh")(left)
    b = L.Dense(8, "tanh")(right)
    early = L.Dense(1, name="early")(a)
    c = L.Dense(8, "tanh")(L.Concatenate()([a, b]))
    late = L.Dense(3, "softmax", name="late")(L.Dense(8, "tanh")(c))
    model = keras.Model({"left": left, "right": right}, {"early": early, "late": late})
    x = {"left": rows(), "right": rows(6)}
    y = {"early": rows(1), "late": classes()}
    return model, x, y, {"early": keras.losses.MeanSquaredError(), "late": SPARSE()}


def shared():
    """One layer twice, a nested model, and operations that are no layers."""
    twice = L.Dense(12, "tanh")
    inner = keras.Sequential([keras.Input((12,)), L.Dense(12, "relu"), L.Dense(12)])
    first = keras.Input((12,))
    a = twice(first)
    b = keras.ops.sin(inner(a)) * 2.0
    c = twice(keras.ops.stop_gradient(b) + a)
    return keras.Model(first, L.Dense(3)(c)), rows(), classes(), SPARSE(from_logits=True)


def attention():
    words = keras.Input((5,), dtype="int32")
    a = L.Embedding(11, 8)(words)
    b = L.LayerNormalization()(L.MultiHeadAttention(2, 4)(a, a) + a)
    out = L.Dense(3)(L.GlobalAveragePooling1D()(L.Dense(8, "relu")(b)))
    return keras.Model(words, out), random.integers(0, 11, (SAMPLES, 5)).astype("int32"), classes(), SPARSE(True)


def masked():
    """A mask that crosses the cuts, and a loss over its valid positions."""
    words = keras.Input((5,), dtype="int32")
    a = L.Embedding(11, 8, mask_zero=True)(words)
    b = L.LSTM(8, return_sequences=True)(a)
    out = L.Dense(3)(L.Dense(8, "tanh")(b))
    x = random.integers(0, 11, (SAMPLES, 5)).astype("int32")
    x[:, 0] = 1  # no row is empty
    return keras.Model(words, out), x, classes(5), SPARSE(from_logits=True)


def ignored():
    """A class that does not count: the mask is on the values of the loss."""
    model = keras.Sequential([keras.Input((12,)), *[L.Dense(12, "tanh") for _ in range(3)], L.Dense(3)])
    y = classes()
    y[:13] = -1
    return model, rows(), y, SPARSE(from_logits=True, ignore_class=-1)


def regularized():
    """Of weights, of outputs, and a loss that a layer adds."""

    class Adds(L.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    model = keras.Sequential(
        [
            keras.Input((12,)),
            L.Dense(12, "tanh", kernel_regularizer="l2"),
            L.Dense(12, "tanh", activity_regularizer="l2"),
            Adds(),
            L.Dense(3, "softmax", bias_regularizer="l1"),
        ]
    )
    return model, rows(), classes(), SPARSE()


ALL = [sequential, skip, two_ends, shared, attention, masked, ignored, regularized]
