"""Checks with one worker, which trains as one process does; ps_checks.py runs them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess.ps_parts import (
    SPARSE,
    assert_like_plain,
    assert_same,
    batches,
    data,
    dense,
    pair,
    refused,
    with_workers,
)


@with_workers(1)
def promise_1_one_worker_is_one_process(strategy):
    """With a last batch that is shorter, shuffled, and over two ps."""
    assert_like_plain(strategy, dense, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    assert_like_plain(strategy, dense, lambda: keras.optimizers.Adam(0.01))


@with_workers(1)
def clipping_decay_ema_accumulation(strategy):
    for optimizer in (
        lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
        lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
        lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True, ema_momentum=0.9),
        lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Lamb(0.05),
    ):
        assert_like_plain(strategy, dense, optimizer)


@with_workers(1)
def layers_that_write_and_add(strategy):
    """BatchNormalization's statistics, regularizers, add_loss, constraints, an embedding."""

    class Activity(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.01 * keras.ops.mean(x**2))
            return x

    def build():
        return keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, kernel_regularizer="l2", kernel_constraint="max_norm"),
                keras.layers.BatchNormalization(),
                Activity(),
                keras.layers.Dense(3, "softmax"),
            ]
        )

    assert_like_plain(strategy, build, lambda: keras.optimizers.SGD(0.1))
    ids, y = np.random.default_rng(1).integers(0, 50, (100, 4)), data()[1]

    def embedded():
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(3, "softmax")]
        )

    assert_like_plain(strategy, embedded, lambda: keras.optimizers.SGD(0.5), x=ids, y=y)


@with_workers(1)
def weights_validation_schedules_and_callbacks(strategy):
    """Sample and class weights, validation, a schedule, a callback that sets the rate, early stopping."""
    x, y = data()
    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    for fit in (
        {"sample_weight": np.linspace(0.0, 2.0, 100)},
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
        {"validation_data": (x[:30], y[:30]), "callbacks": [halves], "epochs": 3},
        {"validation_split": 0.25},
    ):
        assert_like_plain(strategy, dense, lambda: keras.optimizers.SGD(0.2), fit=fit)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    assert_like_plain(strategy, dense, lambda: keras.optimizers.SGD(schedule))
    stop = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=0)
    fit = {"callbacks": [stop], "epochs": 5}
    ours, _ = assert_like_plain(strategy, dense, lambda: keras.optimizers.SGD(0.1), fit=fit)
    assert int(ours.optimizer.iterations) == 2 * 7


@with_workers(1)
def several_outputs_and_a_step_of_ones_own(strategy):
    x, y = data()

    def two():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        a, b = keras.layers.Dense(3, "softmax", name="a"), keras.layers.Dense(1, name="b")
        return keras.Model(inputs, {"a": a(hidden), "b": b(hidden)})

    assert_like_plain(
        strategy,
        two,
        lambda: keras.optimizers.SGD(0.1),
        x=x,
        y={"a": y, "b": x[:, :1]},
        loss={"a": SPARSE, "b": "mse"},
        metrics=(),
    )

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(3, "softmax")

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own": loss}

    ours, plain = pair(strategy, Own, lambda: keras.optimizers.SGD(0.1), metrics=())
    for model in (ours, plain):
        model.fit(x, y, batch_size=20, epochs=1, shuffle=False, verbose=0)
    assert_same(ours, plain)


@with_workers(1)
def datasets_steps_and_generators(strategy):
    """P5: a finite dataset, steps_per_epoch given, and a generator that may be read once."""
    x, y = data(96)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    for given, fit in (
        (dataset, {}),
        (dataset.repeat(), {"steps_per_epoch": 3}),
        (dataset, {"steps_per_epoch": 10, "epochs": 1}),
    ):
        ours, plain = pair(strategy, dense, lambda: keras.optimizers.SGD(0.1))
        for model in (ours, plain):
            model.fit(given, epochs=fit.get("epochs", 2), steps_per_epoch=fit.get("steps_per_epoch"), verbose=0)
        assert_same(ours, plain)

    ours, plain = pair(strategy, dense, lambda: keras.optimizers.SGD(0.1))
    ours.fit(lambda context: dataset.repeat(context.num_input_pipelines), epochs=2, verbose=0)
    plain.fit(dataset, epochs=2, verbose=0)
    assert_same(ours, plain)
    refused(lambda: ours.fit(lambda context: x, verbose=0), "returned ndarray, expected a batched tf.data.Dataset")

    ours, plain = pair(strategy, dense, lambda: keras.optimizers.SGD(0.1))
    for model in (ours, plain):
        model.fit(batches(x, y), epochs=1, steps_per_epoch=6, verbose=0)
    assert_same(ours, plain)


@with_workers(1)
def recurrent_layers_and_a_missing_weight(strategy):
    """A loop in the model, whose gradient is a loop; a generator whose batches have None for a part."""
    random = np.random.default_rng(2)
    x, y = random.normal(size=(64, 5, 3)).astype("float32"), random.integers(0, 3, 64)

    def build():
        layers = keras.layers
        return keras.Sequential([keras.Input((None, 3)), layers.LSTM(8), layers.Dense(3, "softmax")])

    assert_like_plain(strategy, build, lambda: keras.optimizers.Adam(0.01), x=x, y=y)

    ours, plain = pair(strategy, build, lambda: keras.optimizers.SGD(0.1))
    for model in (ours, plain):
        model.fit(batches(x, y, None), epochs=1, steps_per_epoch=4, verbose=0)
    assert_same(ours, plain)


@with_workers(1)
def callbacks_in_the_middle_of_an_epoch(strategy):
    """They see losses, and may evaluate: what the chief holds then."""
    x, y = data(320)
    losses, values = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(float(logs["loss"]))
            if batch == 15:
                before = self.model.get_weights()
                found = self.model.evaluate(x, y, verbose=0, return_dict=True)
                values.append((found["loss"], before, self.model.get_weights()))

    ours, plain = pair(strategy, dense, lambda: keras.optimizers.SGD(0.1), metrics=())
    ours.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[Look()])
    assert min(losses) > 0
    for loss, before, after in values:
        plain.set_weights(before)
        np.testing.assert_allclose(loss, plain.evaluate(x, y, verbose=0), rtol=1e-5)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


@with_workers(1)
def random_layers_draw_anew_in_each_step(strategy):
    class Mean(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="kept")
            self.values = self.add_weight(shape=(), initializer="zeros", name="values")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.values.assign_add(tf.reduce_sum(y_pred))

        def result(self):
            return self.values

    def build():
        layers = keras.layers
        return keras.Sequential([keras.Input((1000,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)])

    keras.utils.set_random_seed(4)
    model = strategy.distribute(build())
    model.layers[-1].kernel.assign(tf.ones((1000, 1)) / 1000)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Mean()])

    seen = []
    for _ in range(3):
        history = model.fit(np.ones((4, 1000)), np.zeros((4, 1)), batch_size=1, epochs=1, verbose=0)
        seen.append(history.history["kept"][0])
    assert len(set(seen)) == 3
    assert all(3.5 < s < 4.5 for s in seen)


@with_workers(1)
def mistakes_are_named(strategy):
    model = strategy.distribute(dense())
    for arguments, words in (
        ({"jit_compile": True}, "jit_compile=True) was passed"),
        ({"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())}, "keeps one loss scale"),
    ):
        refused(lambda kw=arguments: model.compile(**{"loss": SPARSE, "optimizer": "sgd", **kw}), words)
    model.compile("sgd", SPARSE, run_eagerly=True)
    x, y = data()
    refused(lambda: model.fit(x, y, verbose=0), "run_eagerly=True")
    model.compile("sgd", SPARSE)
    refused(lambda: model.train_on_batch(x, y), "train_on_batch")
    refused(lambda: strategy.distribute("model"), "received str")
    refused(tfdist.ParameterServerStrategy, "found no TF_CONFIG")

    class Lazy(keras.Sequential):
        def train_step(self, data):
            return {"loss": 0.0}

    lazy = strategy.distribute(Lazy([keras.Input((8,)), keras.layers.Dense(3)]))
    lazy.compile("sgd", SPARSE)
    refused(lambda: lazy.fit(x, y, verbose=0), "applied no optimizer")
    # What fails on a worker fails here, and the next fit works.
    bad = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")]))
    bad.compile("sgd", SPARSE)
    try:
        bad.fit(x, y + 100, batch_size=16, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        assert "valid range" in str(error), error
    else:
        raise AssertionError("labels out of range were accepted")
    bad.fit(x, y, batch_size=16, verbose=0)
    assert int(bad.optimizer.iterations) == 7


@with_workers(1)
def pipelines_of_arrays_are_not_tuned(strategy):
    """The end of a tuned one may wait for the thread that tunes it; a pipeline of the user's stays as it is."""
    x, y = data()
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(strategy.experimental_distribute_dataset(pipeline).options().autotune.enabled)

        on_test_begin = on_predict_begin = on_train_begin

    model = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")]))
    model.compile("sgd", SPARSE)
    for given, labels, batch, expected in ((x, y, 16, False), (pipeline, None, None, None)):
        seen = []
        model.fit(given, labels, batch_size=batch, verbose=0, callbacks=[Looks()])
        model.evaluate(given, labels, batch_size=batch, verbose=0, callbacks=[Looks()])
        model.predict(given, batch_size=batch, verbose=0, callbacks=[Looks()])
        assert seen == [expected] * 3, seen
