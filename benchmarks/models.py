"""The models of the measurements, in Keras, and the arrays they are trained on.

| name | layers | tensors | gradients |
|---|---|---|---|
| deep | 102 Dense(128): many small tensors | 204 | 6.7 MB |
| mlp | 784-2048-2048-10: few large tensors | 6 | 23 MB |
| cnn | the usual MNIST CNN: much compute | 8 | 4.8 MB |
| transformer | 2 encoder blocks of width 64 over 32 tokens | 35 | 0.9 MB |
| wide | Embedding(1,000,000 x 64), mean over 20 ids, 2 Dense: few rows of a large table | 5 | 256 MB |
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import keras

NAMES = ("deep", "mlp", "cnn", "transformer")  # of the ring
PS_NAMES = ("deep", "mlp", "cnn", "wide")  # of the parameter server
BATCH = 64  # samples a rank
RATE = 0.01
VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 2000, 32, 64, 4, 2


class Table(NamedTuple):
    """The Embedding of `wide`, and how much of it a sample touches."""

    rows: int = 1_000_000
    ids: int = 20  # a sample


def arrays(name: str, samples: int, table: Table | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): random inputs of a model and labels in 0..9, the same in every process."""
    random = np.random.default_rng(0)
    y = random.integers(0, 10, samples).astype("int32")
    if name == "transformer":
        return random.integers(0, VOCABULARY, (samples, LENGTH)).astype("int32"), y
    if name == "wide":
        rows, ids = table or Table()
        return random.integers(0, rows, (samples, ids)).astype("int32"), y
    shape = {"deep": (128,), "mlp": (784,), "cnn": (28, 28, 1)}[name]
    return random.random((samples, *shape), dtype="float32"), y


def build(name: str, table: Table | None = None, keras: ModuleType | None = None) -> keras.Model:
    """A Keras model by its name; its last layer gives 10 logits.

    Args:
        name: one of `NAMES` or `PS_NAMES`.
        table: of `wide`.
        keras: in place of Keras 3, such as tf_keras, which lacks what `transformer` needs.
    """
    if keras is None:
        import keras
    if name == "wide":
        return _wide(keras, table or Table())
    return {"deep": _deep, "mlp": _mlp, "cnn": _cnn, "transformer": _transformer}[name](keras)


def _deep(keras: ModuleType) -> keras.Model:
    hidden = [keras.layers.Dense(128, activation="relu") for _ in range(101)]
    return keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(10)])


def _mlp(keras: ModuleType) -> keras.Model:
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def _cnn(keras: ModuleType) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def _wide(keras: ModuleType, table: Table) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((table.ids,), dtype="int32"),
            layers.Embedding(table.rows, WIDTH),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def _transformer(keras: ModuleType) -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    # The table is looked up by a product, which leaves all gradients dense as in the peers.
    x = layers.Dense(WIDTH, use_bias=False)(keras.ops.one_hot(tokens, VOCABULARY))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
        x = layers.LayerNormalization()(x + attended)
        wide = layers.Dense(4 * WIDTH, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(wide))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
