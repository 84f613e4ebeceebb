"""What the checks of consistencies share: embeddings in several uses, and plain Keras to compare them with."""

from __future__ import annotations

import signal
import subprocess
import time

import keras
import numpy as np
import tensorflow as tf

from tests.multiprocess.ps_parts import assert_same, data
from tfdist.tasks.board import listens

ROWS = 3000  # of a table, 8 wide: large enough to be held by rows


class DenseGradient(keras.layers.Embedding):
    """The oracle: Keras' optimizers square repeated rows of a sparse gradient one by one."""

    def call(self, inputs):
        return tf.gather(tf.convert_to_tensor(self.embeddings) * 1.0, inputs)


def id_data(rows=100, columns=4, high=ROWS):
    """Ids, half of them in two batches, and labels."""
    ids = np.random.default_rng(1).integers(0, high, (rows, columns))
    ids[: rows // 2] = ids[rows - rows // 2 :]
    return ids, data(rows)[1]


def twice(embedding):
    """An Embedding called twice."""
    inputs = keras.Input((4,), dtype="int32")
    table = embedding(ROWS, 8)
    joined = keras.layers.Flatten()(table(inputs) + table((inputs + 1) % ROWS))
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(joined))


def tied(embedding):
    """The table is used as output weights too."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = embedding(ROWS, 8)

        def build(self, shape):
            self.table.build(shape)

        def call(self, ids):
            hidden = keras.ops.mean(self.table(ids), axis=1)
            return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))

    return Tied()


def regularized(embedding):
    layers = keras.layers
    table = embedding(ROWS, 8, embeddings_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), table, layers.Flatten(), layers.Dense(3, "softmax")]
    )


def in_a_loop(embedding):
    """Within the loop of an RNN, whose gradient is a graph of its own."""

    class Cell(keras.layers.Layer):
        state_size = output_size = 8

        def __init__(self):
            super().__init__()
            self.table = embedding(ROWS, 8)

        def build(self, shape):
            self.table.build((shape[0],))

        def call(self, ids, states):
            state = keras.ops.tanh(states[0] + self.table(keras.ops.cast(ids[:, 0], "int32")))
            return state, [state]

    layers = keras.layers
    return keras.Sequential([keras.Input((None, 1)), layers.RNN(Cell()), layers.Dense(3, "softmax")])


def per_step(embedding):
    layers = keras.layers
    inputs = keras.Input((4, 2), dtype="int32")
    rows = layers.TimeDistributed(embedding(ROWS, 8))(inputs)
    return keras.Model(inputs, layers.Dense(3, "softmax")(layers.Flatten()(rows)))


def masked(embedding, width=8):
    """Positions of id 0 do not count in the loss."""
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    rows = embedding(ROWS, width, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(3, "softmax")(layers.LSTM(4, return_sequences=True)(rows)))


def masked_data(rows=50):
    random = np.random.default_rng(7)
    ids = random.integers(1, ROWS, (rows, 6))
    ids[np.arange(6) >= random.integers(1, 7, rows)[:, None]] = 0
    return ids, random.integers(0, 3, (rows, 6))


def assert_embedding(strategy, build, optimizer, x, y, by_rows, logs=("loss", "accuracy"), **fit):
    """A model with an Embedding trains as plain Keras does on dense gradients; whether its table is held by rows."""
    models = []
    for embedding in (keras.layers.Embedding, DenseGradient):
        keras.utils.set_random_seed(4)
        model = build(embedding)
        if embedding is not DenseGradient:
            model = strategy.distribute(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=build is tied)
        model.compile(optimizer(), loss, metrics=["accuracy"])
        models.append(model)
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    histories = [m.fit(x, y, **fit).history for m in models]
    assert_same(*models)
    assert bool(models[0].__dict__["_tfdist"]._store.tables) == by_rows
    for name in logs:
        np.testing.assert_allclose(histories[0][name], histories[1][name], rtol=1e-4, err_msg=name)
    return models[0]


TURNS = "while kill -STOP $0; do sleep 0.18; kill -CONT $0; sleep 0.02; done"


class Slow(keras.callbacks.Callback):
    """From the fifth batch on a process gets its turn for a tenth of the time only, until `stop()`.

    Another process sees to that: a thread of this one would need the lock of Python, which TensorFlow holds at times
    while it waits for a worker.
    """

    def __init__(self, process):
        super().__init__()
        self.process, self.turns = process, None

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5:
            self.turns = subprocess.Popen(["sh", "-c", TURNS, str(self.process.pid)])

    def stop(self):
        if self.turns is not None:
            self.turns.kill()
            self.turns.wait()
        self.process.send_signal(signal.SIGCONT)


def wait_for(address, seconds=60):
    """Until a task listens."""
    ends = time.monotonic() + seconds
    while not listens(address):
        assert time.monotonic() < ends, f"nothing listens at {address}"
        time.sleep(0.1)
