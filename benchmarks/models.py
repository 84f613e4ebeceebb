"""The models that the ring is measured with, in Keras, and the arrays they are trained on.

| name | layers | tensors | gradients |
|---|---|---|---|
| deep | 102 Dense(128): many small tensors | 204 | 6.7 MB |
| mlp | 784-2048-2048-10: few large tensors | 6 | 23 MB |
| cnn | the usual MNIST CNN: much compute | 8 | 4.8 MB |
| transformer | 2 encoder blocks of width 64 over 32 tokens | 35 | 0.9 MB |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras

NAMES = ("deep", "mlp", "cnn", "transformer")
BATCH = 64  # samples a rank
RATE = 0.01
VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 2000, 32, 64, 4, 2


def arrays(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): random inputs of a model and labels in 0..9, the same in every process."""
    random = np.random.default_rng(0)
    y = random.integers(0, 10, samples).astype("int32")
    if name == "transformer":
        return random.integers(0, VOCABULARY, (samples, LENGTH)).astype("int32"), y
    shape = {"deep": (128,), "mlp": (784,), "cnn": (28, 28, 1)}[name]
    return random.random((samples, *shape), dtype="float32"), y


def build(name: str) -> keras.Model:
    """A Keras model by its name; its last layer gives 10 logits."""
    return {"deep": _deep, "mlp": _mlp, "cnn": _cnn, "transformer": _transformer}[name]()


def _deep() -> keras.Model:
    import keras

    hidden = [keras.layers.Dense(128, activation="relu") for _ in range(101)]
    return keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(10)])


def _mlp() -> keras.Model:
    import keras

    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def _cnn() -> keras.Model:
    import keras
    from keras import layers

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


def _transformer() -> keras.Model:
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    # The table is looked up by a product, which leaves all gradients dense as in the peers.
    x = layers.Dense(WIDTH, use_bias=False)(keras.ops.one_hot(tokens, VOCABULARY))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
        x = layers.LayerNormalization()(x + attended)
        wide = layers.Dense(4 * WIDTH, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(wide))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
