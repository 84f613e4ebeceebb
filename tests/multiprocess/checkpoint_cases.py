"""Trainings that are interrupted and gone on with, and plain Keras that is not: what checkpoints are tested on."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist

L = keras.layers


def rows(count=96, columns=6):
    """(x, y) of a regression."""
    random = np.random.default_rng(5)
    x = random.normal(size=(count, columns)).astype("float32")
    return x, np.tanh(x.sum(axis=1, keepdims=True)).astype("float32")


def dense(dropout=0.0):
    middle = [L.Dropout(dropout)] if dropout else []
    return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh"), *middle, L.Dense(1)])


def normed():
    return keras.Sequential([keras.Input((6,)), L.Dense(8), L.BatchNormalization(), L.Dense(1)])


class Shuffled(keras.utils.PyDataset):
    """Batches whose order Keras draws from Python's `random`."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = rows()
        return x[index * 16 : index * 16 + 16], y[index * 16 : index * 16 + 16]


def dataset(repeat=False):
    """Six batches in an order that is another in each epoch."""
    data = tf.data.Dataset.from_tensor_slices(rows()).shuffle(96, seed=3).batch(16)
    return data.repeat() if repeat else data


def arrays(**kwargs):
    x, y = rows()
    return {"x": x, "y": y, "batch_size": 16, **kwargs}


class Twice(keras.callbacks.Callback):
    """Changes the learning rate at the end of epochs."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5


class At(keras.callbacks.Callback):
    """Tells a checkpoint to end the training at a step, on those ranks that have it."""

    def __init__(self, checkpoint, epoch, step, how="leave"):
        super().__init__()
        self.checkpoint, self.place, self.how, self.epoch = checkpoint, (epoch, step), how, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            getattr(self.checkpoint, self.how)()


def compiled(build, optimizer, strategy=None, **kwargs):
    keras.utils.set_random_seed(7)
    model = strategy.distribute(build()) if strategy is not None else build()
    model.compile(optimizer(), "mse", metrics=["mae"], **kwargs)
    return model


def straight(build, optimizer, fit, callbacks=(), **kwargs):
    """(model, history) of plain Keras."""
    model = compiled(build, optimizer, **kwargs)
    return model, model.fit(**fit(), callbacks=list(callbacks), verbose=0)


def interrupted(folder, strategy, build, optimizer, fit, at, callbacks=(), told=True, **kwargs):
    """(model, history of the last run) of a training that is left at each (epoch, step) of `at`, and gone on with.

    Args:
      told: whether this rank is told to leave, or hears it from another.
    """
    for place in [*at, None]:
        model = compiled(build, optimizer, strategy, **kwargs)
        checkpoint = tfdist.Checkpoint(folder)
        others = [] if place is None or not told else [At(checkpoint, *place)]
        left = place is not None
        with contextlib.suppress(SystemExit) if left else contextlib.nullcontext():
            history = model.fit(**fit(), callbacks=[checkpoint, *callbacks, *others], verbose=0)
            assert not left, "the training was not left"
    assert tfdist.rank() != 0 or not folder.exists()
    return model, history


def assert_same(ours, plain, atol=2e-6):
    """Weights and optimizers of two (model, history), and what their last epochs logged."""
    for name, variables in (("weight", "weights"), ("optimizer", "optimizer")):
        mine, others = (
            getattr(m[0], variables) if name == "weight" else m[0].optimizer.variables for m in (ours, plain)
        )
        for a, b in zip(mine, others, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=atol, rtol=1e-5, err_msg=f"{name} {b.path}")
    for name, values in ours[1].history.items():
        whole = plain[1].history[name][-len(values) :]
        np.testing.assert_allclose(values, whole, rtol=1e-4, err_msg=name)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01)


def accumulating():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, use_ema=True), dynamic_growth_steps=5)


CASES = {
    # name: (build, optimizer, arguments of fit, where it is left)
    "arrays, twice": (dense, adam, lambda: arrays(epochs=3), [(0, 1), (1, 3)]),
    "slots of momentum, validation": (dense, sgd, lambda: arrays(epochs=2, validation_split=0.25), [(1, 1)]),
    "a dataset in another order each epoch": (dense, adam, lambda: {"x": dataset(), "epochs": 3}, [(1, 2)]),
    "a PyDataset": (dense, adam, lambda: {"x": Shuffled(), "epochs": 3, "shuffle": True}, [(1, 2)]),
    "steps of an endless dataset": (
        dense, adam, lambda: {"x": dataset(True), "epochs": 3, "steps_per_epoch": 4}, [(1, 2)],
    ),
    "steps that cut arrays into epochs": (
        dense, adam, lambda: arrays(epochs=5, initial_epoch=1, steps_per_epoch=3), [(2, 1)],
    ),
    "accumulated gradients": (dense, accumulating, lambda: arrays(epochs=4), [(0, 5), (2, 1)]),
    "a scaled loss, averaged weights": (dense, scaled, lambda: arrays(epochs=3), [(1, 3)]),
}  # fmt: skip
