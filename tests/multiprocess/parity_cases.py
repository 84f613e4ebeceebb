"""Small trainings, each run once by plain Keras and once by the ranks of a ring. `test_parity` compares them.

A case takes a `Way` (plain or ring) and returns what must be equal: weights, and the history of `fit`. Batches of
32 out of 103 rows: two ranks share the last batch as 3 + 4, three ranks every batch unequally. Arrays are shuffled,
so the order of samples is part of the comparison.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras.regularizers import L2

ROWS, BATCH = 103, 32
CASES: dict[str, Any] = {}
TOLERANCE: dict[str, float] = {}


@dataclass
class Way:
    """How a case runs: `strategy` is None for plain Keras."""

    strategy: Any = None

    def scope(self):
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def distribute(self, model):
        return self.strategy.distribute(model) if self.strategy else model


def case(tolerance: float = 3e-6):
    def register(fn):
        CASES[fn.__name__] = fn
        TOLERANCE[fn.__name__] = tolerance
        return fn

    return register


def data(rows: int = ROWS, width: int = 8, classes: int = 4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, width)).astype("float32")
    return x, (x @ rng.normal(size=(width, classes))).argmax(-1).astype("int32")


def dense(*, regularize: bool = False):
    reg = L2(0.02) if regularize else None
    return keras.Sequential(
        [keras.Input((8,)), L.Dense(16, "tanh", kernel_regularizer=reg), L.Dense(4)]
    )


def cross_entropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def result(model, history=None):
    logs = {} if history is None else {k: np.array(v) for k, v in history.history.items()}
    return [np.array(w) for w in model.get_weights()], logs


def fit(way: Way, model, optimizer, loss=None, x=None, y=None, rows=ROWS, compile_=None, **kwargs):
    """Compiles and fits under the way's scope; two epochs of shuffled arrays unless told otherwise."""
    if x is None:
        x, y = data(rows)
    with way.scope():
        model = way.distribute(model)
        model.compile(optimizer, loss or cross_entropy(), **{"metrics": ["accuracy"], **(compile_ or {})})
    call = {"batch_size": BATCH, "epochs": 2, "verbose": 0, **kwargs}
    return result(model, model.fit(x, y, **call))


def summing(way: Way, optimizer):
    """For plain Keras: repeated ids of an embedding summed before the update, as a dense gradient would be.

    Keras' Adam squares the parts of a repeated row one by one; tfdist sums them first, on any number of ranks.
    """
    if way.strategy is None:
        plain = optimizer.apply
        optimizer.apply = lambda grads, variables: plain([tf.convert_to_tensor(g) for g in grads], variables)
    return optimizer


def optimizer_case(name: str, make, tolerance: float = 3e-6):
    def run(way: Way):
        return fit(way, dense(), make())

    run.__name__ = name
    case(tolerance)(run)


O = keras.optimizers
optimizer_case("sgd_momentum", lambda: O.SGD(0.1, momentum=0.9, nesterov=True))
optimizer_case("adam", lambda: O.Adam(0.01))
optimizer_case("adamw", lambda: O.AdamW(0.01, weight_decay=0.05))
optimizer_case("clipnorm", lambda: O.SGD(0.5, clipnorm=0.05))
optimizer_case("global_clipnorm", lambda: O.SGD(0.5, momentum=0.9, global_clipnorm=0.05))
optimizer_case("clipvalue", lambda: O.SGD(0.5, clipvalue=0.01))
optimizer_case("accumulation", lambda: O.SGD(0.5, clipnorm=0.05, gradient_accumulation_steps=3))
optimizer_case("ema", lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3))


@case()
def synchronized_norm(way):
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(16), L.BatchNormalization(synchronized=True), L.ReLU(), L.Dense(4)]
    )
    return fit(way, model, O.SGD(0.1, momentum=0.9), validation_split=0.2)


@case()
def embedding_repeated_ids(way):
    ids = np.random.default_rng(1).integers(0, 6, (ROWS, 5))
    model = keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(50, 8), L.Flatten(), L.Dense(4)])
    return fit(way, model, summing(way, O.Adam(0.01)), x=ids, y=data()[1])


def transformer():
    ids = keras.Input((7,), dtype="int32")
    h = L.Embedding(20, 16, mask_zero=True)(ids)
    h = L.LayerNormalization()(h + L.MultiHeadAttention(2, 8)(h, h))
    h = L.LayerNormalization()(h + L.Dense(16)(L.Dense(32, "relu")(h)))
    return keras.Model(ids, L.Dense(20)(h))


def tokens():
    rng = np.random.default_rng(2)
    ids = rng.integers(1, 20, (ROWS, 7))
    ids[np.arange(7)[None] >= rng.integers(1, 8, ROWS)[:, None]] = 0
    return ids, np.roll(ids, -1, axis=1)


@case(1e-5)
def transformer_masked_loss(way):
    x, y = tokens()
    return fit(way, transformer(), summing(way, O.Adam(0.005)), x=x, y=y)


@case(1e-5)
def masked_loss_and_weights(way):
    x, y = tokens()
    chosen = {"sample_weight": np.random.default_rng(3).uniform(0, 2, (ROWS, 7)).astype("float32")}
    return fit(way, transformer(), O.SGD(0.1), cross_entropy(reduction="mean_with_sample_weight"), x=x, y=y, **chosen)


@case(1e-5)
def ignored_class(way):
    """The mask of `ignore_class` is on the loss' values, and a mask of the predictions joins it."""
    x, y = tokens()
    y = np.where(np.random.default_rng(4).random(y.shape) < np.linspace(0, 1, ROWS)[:, None], -1, y)
    return fit(way, transformer(), O.SGD(0.1), cross_entropy(ignore_class=-1), x=x, y=y)


@case(4e-3)
def mixed_float16(way):
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        return fit(way, dense(), O.SGD(0.05, momentum=0.9), compile_={"metrics": None})
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@case(4e-3)
def mixed_float16_accumulation(way):
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        return fit(way, dense(), O.SGD(0.05, gradient_accumulation_steps=2), compile_={"metrics": None})
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@case()
def steps_per_execution(way):
    return fit(way, dense(), O.Adam(0.01), rows=10 * BATCH - 9, compile_={"steps_per_execution": 4})


@case()
def run_eagerly(way):
    return fit(way, dense(), O.Adam(0.01), compile_={"run_eagerly": True})


@case()
def sample_weight(way):
    weight = np.random.default_rng(3).uniform(0, 2, ROWS).astype("float32")
    return fit(way, dense(), O.SGD(0.1), sample_weight=weight, compile_={"weighted_metrics": ["accuracy"]})


@case()
def class_weight(way):
    return fit(way, dense(), O.SGD(0.1), class_weight={0: 1.0, 1: 3.0, 2: 0.2, 3: 1.0})


@case()
def mean_with_sample_weight(way):
    weight = np.random.default_rng(3).uniform(0, 2, ROWS).astype("float32")
    return fit(way, dense(), O.SGD(0.1), cross_entropy(reduction="mean_with_sample_weight"), sample_weight=weight)


@case(1e-5)
def summed_loss(way):
    return fit(way, dense(), O.SGD(0.002), cross_entropy(reduction="sum"))


@case()
def added_loss_and_regularizers(way):
    @keras.saving.register_keras_serializable("tfdist_tests")
    class Activity(L.Layer):
        def call(self, h):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(h)))
            return h

    model = keras.Sequential([keras.Input((8,)), L.Dense(16, kernel_regularizer=L2(0.05)), Activity(), L.Dense(4)])
    return fit(way, model, O.SGD(0.1))


@case(1e-5)
def regularizer_beside_masked_loss(way):
    x, y = tokens()
    ids = keras.Input((7,), dtype="int32")
    model = keras.Model(ids, L.Dense(20, kernel_regularizer=L2(0.05))(L.Embedding(20, 16, mask_zero=True)(ids)))
    return fit(way, model, O.SGD(0.5), x=x, y=y)


@case(1e-5)
def several_outputs(way):
    x, y = data()
    i = keras.Input((8,), name="features")
    h = L.Dense(16, "tanh")(i)
    model = keras.Model({"features": i}, {"kind": L.Dense(4, name="kind")(h), "size": L.Dense(1, name="size")(h)})
    loss = {"kind": cross_entropy(), "size": keras.losses.MeanSquaredError(reduction="sum")}
    targets = {"kind": y, "size": x.sum(-1, keepdims=True)}
    compile_ = {"loss_weights": {"kind": 1.0, "size": 0.01}, "metrics": {"kind": ["accuracy"], "size": ["mae"]}}
    return fit(way, model, O.SGD(0.05), loss, x={"features": x}, y=targets, compile_=compile_)


@case()
def frozen_and_unused(way):
    class Odd(keras.Model):
        def __init__(self):
            super().__init__()
            self.frozen, self.unused, self.head = L.Dense(8, trainable=False), L.Dense(3), L.Dense(4)
            self.unused.build((None, 8))

        def call(self, h):
            return self.head(self.frozen(h))

    return fit(way, Odd(), O.Adam(0.01))


class Custom(keras.Sequential):
    """A train_step with a tape of its own, and Keras' losses."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"seen": loss}


@case()
def custom_step_keras_loss(way):
    model = Custom([keras.Input((8,)), L.Dense(16, "tanh"), L.Dense(4)])
    weights, _ = fit(way, model, O.Adam(0.01), compile_={"metrics": None})
    return weights, {}


@case()
def custom_step_raw_loss(way):
    class Raw(keras.Sequential):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                error = tf.one_hot(y, 4) - self(x, training=True)
                loss = tf.reduce_mean(tf.square(error))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Raw([keras.Input((8,)), L.Dense(16, "tanh"), L.Dense(4)])
    weights, _ = fit(way, model, O.SGD(0.3), compile_={"metrics": None})
    return weights, {}


@case()
def custom_step_own_loss_object(way):
    class Own(keras.Sequential):
        loss_fn = None

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Own([keras.Input((8,)), L.Dense(16, "tanh"), L.Dense(4)])
    model.loss_fn = cross_entropy(reduction="sum")
    weights, _ = fit(way, model, O.SGD(0.002), compile_={"metrics": None})
    return weights, {}


@case()
def two_optimizers(way):
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = L.Dense(4), L.Dense(4)

        def call(self, h):
            return self.left(h) + self.right(h)

        def compile(self, left, right):
            super().compile(loss=cross_entropy())
            self.left_optimizer, self.right_optimizer = left, right

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for layer, optimizer in ((self.left, self.left_optimizer), (self.right, self.right_optimizer)):
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return {"loss": loss}

    x, y = data()
    with way.scope():
        model = way.distribute(Pair())
        model.compile(O.SGD(0.2), O.Adam(0.01))
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return model.get_weights(), {}


@case()
def fewer_samples_than_ranks(way):
    """The last batch has one sample: the other ranks stand in as ghosts."""
    model = keras.Sequential([keras.Input((8,)), L.Dense(16, "tanh"), L.LayerNormalization(), L.Dense(4)])
    return fit(way, model, O.Adam(0.01), rows=3 * BATCH + 1, validation_split=0.34)


@case()
def ghosts_with_synchronized_norm(way):
    model = keras.Sequential([keras.Input((8,)), L.Dense(6), L.BatchNormalization(synchronized=True), L.Dense(4)])
    return fit(way, model, O.SGD(0.01), rows=2 * BATCH + 1, epochs=1)
