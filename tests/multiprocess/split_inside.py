"""What the checks of layers in parts share: models with their mapping, and what a traced step does where."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.multiprocess import split_models
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, pair

L = keras.layers
WIDE = {"before": "CPU:0", "wide": ["CPU:1", "CPU:0", "CPU:2"], "last": ["CPU:3", "CPU:2"]}
TABLE = {"table": ["CPU:2", "CPU:0", "CPU:1"], "after": "CPU:3"}
CASES = {}  # of a builder: its mapping


def case(**balance):
    return lambda build: CASES.setdefault(build, balance) and build


@case(**WIDE)
def wide():
    """Columns that no number of devices divides; an activation for each element, and one over all columns."""
    first = keras.Input((12,))
    a = L.Dense(11, "tanh", name="before")(first)
    b = L.Dense(7, "relu", name="wide", kernel_regularizer="l2", bias_regularizer="l1")(a)
    out = L.Dense(3, "softmax", use_bias=False, name="last")(L.Concatenate()([b, first]))
    return keras.Model(first, out), split_models.rows(), split_models.classes(), split_models.SPARSE()


@case(**TABLE)
def table():
    """A mask, and ids that come again and again, some from the end; one table looked at twice."""
    words, more = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    rows = L.Embedding(11, 8, mask_zero=True, embeddings_regularizer="l2", name="table")
    a = L.Add()([rows(words), rows(more)])
    out = L.Dense(3)(L.Dense(8, "tanh", name="after")(a))
    x = [split_models.random.integers(0, 11, (split_models.SAMPLES, 5)).astype("int32") for _ in range(2)]
    x[0][:, 0] = 1  # no row is empty
    x[1][::3, 2] = -1
    return keras.Model([words, more], out), x, split_models.classes(5), split_models.SPARSE(from_logits=True)


@case(heads=["CPU:1", "CPU:2"], back=["CPU:0", "CPU:3"])
def einsum():
    """As in attention: axes in the middle, a bias for all axes and for one that is not cut."""
    first = keras.Input((4, 6))
    a = L.EinsumDense("abc,cde->abde", (4, 3, 5), bias_axes="de", activation="tanh", name="heads")(first)
    b = L.EinsumDense("...de,def->...f", (6,), bias_axes="f", name="back")(a)
    out = L.Dense(3)(L.Flatten()(L.EinsumDense("abc,cde->adbe", (3, 4, 2), bias_axes="e", name="heads2")(b)))
    x = np.random.default_rng(1).normal(size=(split_models.SAMPLES, 4, 6)).astype("float32")
    return keras.Model(first, out), x, split_models.classes(), split_models.SPARSE(from_logits=True)


def trained(build, optimizer=None, epochs=2, balance=None, **options):
    """(split, plain) after the same training, which was compared."""
    options.setdefault("microbatches", 3)
    split, plain, x, y = pair(build, CPUS, optimizer, balance=balance or CASES[build], **options)
    logs = [m.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history for m in (split, plain)]
    try:
        assert_logs(*logs)
        assert_same(split, plain)
    except AssertionError as error:
        raise AssertionError(f"{build.__name__}, {options}, {split.optimizer.get_config()}: {error}") from error
    return split, plain, x, y


def operations(graph):
    """Those of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for name in {n for op in graph.get_operations() for n in _functions(op)}:
        inner = graph._get_function(name)
        if inner is not None and getattr(inner, "graph", None) is not None:
            yield from operations(inner.graph)


def traced(model, step, specs):
    """The graph of one of the model's steps as Keras traces it."""
    step = tf.function(step, autograph=False)
    return model.distribute_strategy.run(lambda: step.get_concrete_function(specs).graph)


def _functions(op):
    return [a.func.name for a in op.node_def.attr.values() if a.HasField("func")]
