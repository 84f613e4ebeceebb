"""Whole calls of fit, evaluate and predict against plain Keras: their inputs, their numbers, their order."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense
from tests.multiprocess.parity_inputs import Rows

CHECKS = Checks(__name__)
O = keras.optimizers


def tutorial():
    """The model of TensorFlow's "Multi-worker training with Keras"."""
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            L.Reshape((28, 28, 1)),
            L.Conv2D(8, 3, activation="relu"),
            L.Flatten(),
            L.Dense(32, activation="relu"),
            L.Dense(10),
        ]
    )


@CHECKS
def r22_the_multi_worker_tutorial(ring):
    """R22: its model and its endless, shuffled dataset with steps_per_epoch: one process' losses."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(200, 28, 28)).astype("float32"), rng.integers(0, 10, 200)
    start = ring.everywhere(tutorial().get_weights())[0]
    losses = []
    for strategy in (None, ring.strategy):
        train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200, seed=3).repeat().batch(64)
        model = strategy.distribute(tutorial()) if strategy else tutorial()
        model.set_weights(start)
        model.compile(O.SGD(0.001), cross_entropy(), metrics=["accuracy"])
        losses.append(model.fit(train, epochs=2, steps_per_epoch=4, verbose=0).history)
    for key in losses[0]:
        np.testing.assert_allclose(losses[1][key], losses[0][key], rtol=1e-5)


@CHECKS
def r26_steps_per_execution(ring):
    """R26: ten batches and a short last one, four steps an execution; datasets of known and unknown length."""
    x, y = data(10 * 16 - 9)

    def known():
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)

    def unknown():
        return known().filter(lambda a, b: True)

    for source in (known, unknown):
        build = dense
        start = ring.everywhere(build().get_weights())[0]
        ends = []
        for strategy in (None, ring.strategy):
            model = strategy.distribute(build()) if strategy else build()
            # Plain Keras counts an update too many where the length is unknown: give it the known one.
            given = source() if strategy else known()
            model.set_weights(start)
            model.compile(O.SGD(0.1), cross_entropy(), steps_per_execution=4 if strategy else 1)
            history = model.fit(given, epochs=2, verbose=0)
            ends.append([*model.get_weights(), np.array(history.history["loss"])])
        for one, other in zip(*ends, strict=True):
            np.testing.assert_allclose(one, other, atol=3e-6)
        assert int(model.optimizer.iterations.numpy()) == 20


@CHECKS
def py_dataset_in_worker_processes(ring):
    """PyDataset with workers of its own, in processes: the batches of one process."""

    def run(strategy, **how):
        keras.utils.set_random_seed(5)
        model = strategy.distribute(dense()) if strategy else dense()
        model.compile(O.SGD(0.1), cross_entropy())
        model.fit(Rows(**how), epochs=2, verbose=0)
        return model.get_weights()

    for one, other in zip(run(ring.strategy, workers=2, use_multiprocessing=True), run(None, workers=1), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


METRICS = {
    "auc": lambda: keras.metrics.AUC(num_thresholds=50),
    "iou": lambda: keras.metrics.BinaryIoU(target_class_ids=[0, 1]),
    "mae": lambda: keras.metrics.MeanAbsoluteError(),
    "accuracy": lambda: keras.metrics.BinaryAccuracy(),
    "r2": lambda: keras.metrics.R2Score(),
}


def scored():
    return keras.Sequential([keras.Input((8,)), L.Dense(1, "sigmoid", name="out")])


@CHECKS
def evaluate_counts_each_sample_once(ring):
    """All kinds of metrics equal those of plain Keras, over arrays, datasets and fewer samples than ranks."""
    x, _ = data(103)
    y = (x[:, :1] > 0.3).astype("float32")
    weight = np.random.default_rng(1).uniform(0, 2, 103).astype("float32")
    plain = scored()
    plain.compile("sgd", "binary_crossentropy", metrics=[m() for m in METRICS.values()], weighted_metrics=["mae"])
    with ring.strategy.scope():
        model = ring.strategy.distribute(scored())
        model.compile("sgd", "binary_crossentropy", metrics=[m() for m in METRICS.values()], weighted_metrics=["mae"])
    model.set_weights(plain.get_weights())

    def dataset(n):
        return tf.data.Dataset.from_tensor_slices((x[:n], y[:n])).batch(10)

    cases = (
        ((x, y), {"batch_size": 16, "sample_weight": weight}),
        ((dataset(101),), {"steps": 10}),
        ((x[:1], y[:1]), {"batch_size": 8}),
    )
    # Names of metrics are numbered by how many a process has built.
    wanted = {
        i: list(plain.evaluate(*given, **how, verbose=0, return_dict=True).values())
        for i, (given, how) in enumerate(cases)
        if i % ring.size == ring.rank
    }
    wanted = {i: values for part in ring.everywhere(wanted) for i, values in part.items()}
    for i, (given, how) in enumerate(cases):
        got = list(model.evaluate(*given, **how, verbose=0, return_dict=True).values())
        np.testing.assert_allclose(got, wanted[i], rtol=2e-5, atol=1e-6, err_msg=str(how))
        assert len({str(g) for g in ring.everywhere(got)}) == 1


@CHECKS
def predict_is_complete_and_ordered(ring):
    """Every sample in the input's order on every rank; with gather=False the rank's own part."""
    x, _ = data(103)
    i = keras.Input((8,))
    outputs = {"double": L.Rescaling(2.0)(i), "sum": L.Lambda(lambda t: tf.reduce_sum(t, -1))(i)}
    model = ring.strategy.distribute(keras.Model(i, outputs))

    def check(got, rows):
        np.testing.assert_allclose(got["double"], 2 * rows, rtol=1e-6)
        np.testing.assert_allclose(got["sum"], rows.sum(-1), rtol=1e-4, atol=1e-5)

    def dataset(n, batch):
        return tf.data.Dataset.from_tensor_slices(x[:n]).batch(batch)

    check(model.predict(x, verbose=0), x)
    check(model.predict(x, batch_size=7, verbose=0), x)
    check(model.predict(x[:1], verbose=0), x[:1])
    check(model.predict(dataset(103, 10), verbose=0), x)
    check(model.predict(dataset(41, 20), verbose=0), x[:41])
    check(model.predict(dataset(103, 10), steps=3, verbose=0), x[:30])
    check(model.predict(x, batch_size=10, steps=3, verbose=0), x[:30])
    unknown = dataset(103, 10).filter(lambda b: True)
    check(model.predict(unknown, verbose=0), x)
    check(model.predict(((x[k : k + 10],) for k in range(0, 103, 10)), verbose=0), x)
    check(model.predict_on_batch(x[:5]), x[:5])
    mine = model.predict(x, gather=False, verbose=0)
    low, high = 103 * ring.rank // 2, 103 * (ring.rank + 1) // 2
    check(mine, x[low:high])
    assert len(model.predict(x[:1], gather=False, verbose=0)["sum"]) == (0, 1)[ring.rank]


test_whole_calls = CHECKS.tests()
