"""Checks of the consistencies with one worker, which trains as one process does; ps_checks.py runs them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess import ps_consistency_parts as parts
from tests.multiprocess.ps_parts import (
    SPARSE,
    assert_like_plain,
    assert_same,
    data,
    dense,
    refused,
    under,
    with_workers,
)

CONSISTENCIES = (
    tfdist.Async("scale"),
    tfdist.Async("dc"),
    tfdist.Bounded(2),
    tfdist.Sync(),
    tfdist.LocalSGD(3),
)


def adam():
    return keras.optimizers.Adam(0.01)


def decaying():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def clipped():
    return keras.optimizers.SGD(0.5, global_clipnorm=0.01)


@with_workers(1)
def every_consistency_is_plain_keras_for_one_worker(strategy):
    for consistency, optimizer in zip(CONSISTENCIES, (adam, decaying, adam, decaying, decaying), strict=True):
        with under(strategy, consistency):
            assert_like_plain(strategy, dense, optimizer)


@with_workers(1)
def embeddings_by_rows_are_plain_keras_for_one_worker(strategy):
    """Called twice in a model; LocalSGD holds tables whole."""
    for consistency in (tfdist.Async("dc"), tfdist.Sync(), tfdist.LocalSGD(3)):
        by_rows = not isinstance(consistency, tfdist.LocalSGD)
        with under(strategy, consistency):
            parts.assert_embedding(strategy, parts.twice, clipped, *parts.id_data(), by_rows=by_rows)


@with_workers(1)
def tables_that_are_needed_whole_are_held_whole(strategy):
    ids, y = parts.id_data()
    parts.assert_embedding(strategy, parts.regularized, adam, ids, y, by_rows=False)
    for consistency in (tfdist.Async(), tfdist.Sync()):
        with under(strategy, consistency):
            parts.assert_embedding(strategy, parts.tied, adam, ids, ids[:, 0], by_rows=False)


@with_workers(1)
def embeddings_in_loops(strategy):
    ids, y = parts.id_data()
    parts.assert_embedding(strategy, parts.in_a_loop, adam, ids[..., None].astype("float32"), y, by_rows=False)
    parts.assert_embedding(strategy, parts.per_step, adam, ids.reshape(50, 4, 2), y[:50], by_rows=True)
    ids, y = parts.masked_data()
    parts.assert_embedding(strategy, parts.masked, adam, ids, y, by_rows=True)


@with_workers(1)
def a_wrong_id_names_the_table(strategy):
    ids, y = parts.id_data()
    model = strategy.distribute(parts.twice(keras.layers.Embedding))
    model.compile("sgd", SPARSE)
    try:
        model.fit(np.where(ids == ids[0, 0], parts.ROWS, ids), y, batch_size=16, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        assert f"embeddings has {parts.ROWS} rows, and a batch asks for others" in str(error), error
    else:
        raise AssertionError("an id out of range was accepted")


@with_workers(1)
def p2_a_file_of_one_consistency_goes_on_under_another(strategy):
    """P2: values and slots of tables as well."""
    import tempfile

    ids, y = parts.id_data()
    models = []
    for distributed in (True, False):
        keras.utils.set_random_seed(4)
        model = parts.twice(keras.layers.Embedding if distributed else parts.DenseGradient)
        model.compile(adam(), SPARSE)
        models.append(strategy.distribute(model) if distributed else model)
    ours, plain = models
    plain.fit(ids, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    ours.fit(ids, y, batch_size=16, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder, under(strategy, tfdist.Sync()):
        ours.save(f"{folder}/model.keras")
        loaded = strategy.distribute(keras.models.load_model(f"{folder}/model.keras"))
        loaded.fit(ids, y, batch_size=16, shuffle=False, verbose=0)
    assert_same(loaded, plain)


@with_workers(1)
def consistencies_that_cannot_be(strategy):
    refused(lambda: tfdist.ParameterServerStrategy(consistency="bounded"), "consistency is 'bounded', expected")
    with under(strategy, tfdist.Sync()):
        assert strategy.num_replicas_in_sync == 1

        # One share is the batch: nothing to synchronize.
        def norm():
            layers = keras.layers
            return keras.Sequential(
                [keras.Input((8,)), layers.Dense(4), layers.BatchNormalization(synchronized=True), layers.Dense(3)]
            )

        model = strategy.distribute(norm())
        model.compile("sgd", "mse")
        x, _ = data()
        model.fit(x, x[:, :3], batch_size=16, verbose=0)
        assert int(model.optimizer.iterations) == 7
