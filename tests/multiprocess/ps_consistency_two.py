"""Checks of the consistencies with two workers; ps_checks.py runs them."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np

import tfdist
from tests.multiprocess import ps_consistency_parts as parts
from tests.multiprocess.ps_parts import (
    CLUSTER,
    SPARSE,
    Sum,
    assert_like_plain,
    assert_same,
    data,
    dense,
    pair,
    refused,
    under,
    with_workers,
)


def adam():
    return keras.optimizers.Adam(0.01)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def clipped():
    return keras.optimizers.SGD(0.5, global_clipnorm=0.01)


def sums(strategy, optimizer="sgd"):
    """A model whose metric is the exact sum of its labels."""
    model = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
    model.compile(optimizer, "mse", metrics=[Sum()])
    return model


@with_workers(2)
def p11_sync_is_plain_keras_on_the_joined_batch(strategy):
    """P11: weights, slots and logs; the last batch is short, down to one row, so that one worker gets nothing."""
    weights = np.linspace(0.1, 2.0, 97)
    with under(strategy, tfdist.Sync()):
        assert strategy.num_replicas_in_sync == 2
        for rows, optimizer, fit in (
            (97, adam, {}),
            (99, momentum, {"sample_weight": np.linspace(0.1, 2.0, 99)}),
            (97, lambda: keras.optimizers.Adam(0.05, clipnorm=0.05), {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
            (97, lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True), {"shuffle": True}),
        ):
            x, y = data(rows)
            assert_like_plain(strategy, dense, optimizer, x=x, y=y, fit=fit)
        x, y = data(97)
        summed = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        assert_like_plain(strategy, regular, clipped, x=x, y=y, loss=summed)
        weighted = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        ours, plain = pair(strategy, dense, momentum, loss=weighted)
        histories = [
            m.fit(x, y, sample_weight=weights, batch_size=16, shuffle=False, verbose=0).history for m in (ours, plain)
        ]
        assert_same(ours, plain)
        np.testing.assert_allclose(histories[0]["accuracy"], histories[1]["accuracy"])


def regular():
    """Regularizers count once, however many shares there are; seeds of random layers are no weights to train."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, "relu", kernel_regularizer="l2"),
            layers.Dropout(1e-9),
            layers.Dense(3, "softmax"),
        ]
    )


@with_workers(2)
def sync_of_several_outputs(strategy):
    x, y = data(97)

    def two():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        a, b = keras.layers.Dense(3, "softmax", name="a"), keras.layers.Dense(1, name="b")
        return keras.Model(inputs, {"a": a(hidden), "b": b(hidden)})

    labels, losses = {"a": y, "b": x[:, :1]}, {"a": SPARSE, "b": "mse"}
    with under(strategy, tfdist.Sync()):
        assert_like_plain(strategy, two, momentum, x=x, y=labels, loss=losses, metrics=())


@with_workers(2)
def sync_of_embeddings(strategy):
    """By rows, clipped after the mean; a masked loss, whose log is the mean of the shares' means."""
    with under(strategy, tfdist.Sync()):
        parts.assert_embedding(strategy, parts.twice, clipped, *parts.id_data(97), by_rows=True)
        ids, y = parts.id_data()
        parts.assert_embedding(strategy, parts.tied, momentum, ids, ids[:, 0], by_rows=False)
        ids, y = parts.masked_data()
        parts.assert_embedding(strategy, parts.masked, adam, ids, y, by_rows=True, logs=("accuracy",))


@with_workers(2)
def what_sync_cannot_do_is_refused_by_name(strategy):
    layers = keras.layers
    ids, y = parts.masked_data()

    def two_masked():
        inputs = keras.Input((6,), dtype="int32")
        rows = layers.Embedding(parts.ROWS, 8, mask_zero=True)(inputs)
        return keras.Model(inputs, [layers.LSTM(3, return_sequences=True, name=n)(rows) for n in "ab"])

    with under(strategy, tfdist.Sync()):
        model = strategy.distribute(two_masked())
        model.compile("sgd", [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in range(2)])
        refused(lambda: model.fit(ids, [y, y], batch_size=16, verbose=0), "has 2 losses, one of them masked")
        norm = layers.BatchNormalization(synchronized=True, name="over_all")
        model = strategy.distribute(keras.Sequential([keras.Input((8,)), layers.Dense(4), norm, layers.Dense(1)]))
        model.compile("sgd", "mse")
        x, _ = data()
        refused(lambda: model.fit(x, x[:, :1], verbose=0), "'over_all' of 'sequential")
    refused(lambda: tfdist.Sync(2).check(strategy.chief.workers), "backup_workers is 2, but the cluster has 2 workers")


@with_workers(2)
def bounded_updates_are_no_later_than_the_bound(strategy):
    x, y = data(320)
    for staleness in (0, 1, 6):
        with under(strategy, tfdist.Bounded(staleness)):
            model, _ = pair(strategy, dense, adam)
            report = tfdist.RunReport()
            history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[report]).history
        late = report.result["late"]
        assert max(late) <= staleness, late
        assert sum(late.values()) == report.result["updates"] == int(model.optimizer.iterations) == 3 * 40
        assert report.result["dropped"] == 0
        assert history["loss"][-1] < history["loss"][0]


@with_workers(2)
def p12_p13_backup_workers(strategy):
    """P12, P13: a slow worker holds nobody up; what comes too late is dropped and counted."""
    x, y = data(640)
    with under(strategy, tfdist.Sync(backup_workers=1)):
        model = sums(strategy, keras.optimizers.SGD(0.0))
        for slow in ([], [parts.Slow(CLUSTER["cluster"].processes["worker/1"])]):
            before = int(model.optimizer.iterations)
            report = tfdist.RunReport()
            try:
                history = model.fit(x, y[:, None], batch_size=16, verbose=0, callbacks=[report, *slow]).history
            finally:
                for callback in slow:
                    callback.stop()
            assert history["sum"] == [y.sum()]
            updates, dropped = report.result["updates"], report.result["dropped"]
            assert updates + dropped == 80  # of each step one of two shares counts
            assert int(model.optimizer.iterations) - before == updates >= 40
        assert dropped > 0
        model, _ = pair(strategy, dense, adam)
        history = model.fit(x, y, batch_size=16, epochs=3, verbose=0).history
        assert history["loss"][-1] < history["loss"][0]


@with_workers(2)
def local_sgd_is_the_average_of_copies(strategy):
    """Against one plain model that plays both workers; the last round is short, and the very last batch too."""
    x, y = data(76)
    rounds = [[[0, 1, 2], [3, 4, 5]], [[6, 7], [8]], [[9]]]
    with under(strategy, tfdist.LocalSGD(steps=3)):
        ours, plain = pair(strategy, dense, adam)
        history = ours.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    plain.optimizer.build(plain.trainable_variables)
    logs, rows = [], []
    for calls in rounds:
        start = [v.numpy() for v in (*plain.weights, *plain.optimizer.variables)]
        copies, samples = [], []
        for numbers in calls:
            for variable, value in zip((*plain.weights, *plain.optimizer.variables), start, strict=True):
                variable.assign(value)
            batches = [slice(8 * n, 8 * n + 8) for n in numbers]
            for batch in batches:
                plain.reset_metrics()
                logs.append(plain.train_on_batch(x[batch], y[batch], return_dict=True))
                rows.append(len(x[batch]))
            copies.append([v.numpy() for v in (*plain.weights, *plain.optimizer.variables)])
            samples.append(sum(len(x[batch]) for batch in batches))
        for variable, *values in zip((*plain.weights, *plain.optimizer.variables), *copies, strict=True):
            whole = variable.dtype in ("int32", "int64")
            variable.assign(max(values) if whole else np.average(values, axis=0, weights=samples))
    assert_same(ours, plain)
    assert int(ours.optimizer.iterations) == 3 + 2 + 1
    for name, values in history.items():
        np.testing.assert_allclose(values, [np.average([each[name] for each in logs], weights=rows)], rtol=1e-5)


@with_workers(2)
def an_interrupt_in_the_middle_of_a_round(strategy):
    """What was left on the ps tasks by then does not count in the next fit."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                os.kill(os.getpid(), signal.SIGINT)

    x, y = data()
    for consistency in (tfdist.Sync(), tfdist.Sync(1), tfdist.LocalSGD(3)):
        with under(strategy, consistency):
            ours, plain = pair(strategy, dense, momentum)
            try:
                ours.fit(x, y, batch_size=8, verbose=0, callbacks=[Interrupt()])
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("no KeyboardInterrupt")
            before = int(ours.optimizer.iterations)
            plain.set_weights(ours.get_weights())
            plain.optimizer.build(plain.trainable_variables)
            for one, other in zip(plain.optimizer.variables, ours.optimizer.variables, strict=True):
                one.assign(other)
            for model in (ours, plain):
                model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            if consistency == tfdist.Sync():
                assert_same(ours, plain)
            else:
                assert int(ours.optimizer.iterations) > before


@with_workers(2)
def p9_a_killed_worker_under_each_consistency(strategy):
    """P9: every sample once, every update; a new worker at its address takes part again."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 20:
                CLUSTER["cluster"].processes["worker/1"].kill()

    x, y = data(320)
    for consistency, updates in ((tfdist.Sync(), 40), (tfdist.Bounded(2), 40), (tfdist.LocalSGD(2), 20)):
        with under(strategy, consistency):
            model = sums(strategy, keras.optimizers.SGD(0.0))
            for callbacks in ([Kill()], []):
                history = model.fit(x, y[:, None], batch_size=8, verbose=0, callbacks=callbacks).history
                assert history["sum"] == [y.sum()], consistency
                if callbacks:
                    CLUSTER["cluster"].restart("worker/1")
                    parts.wait_for(CLUSTER["cluster"].cluster.workers[1])
            assert int(model.optimizer.iterations) == 2 * updates, consistency
