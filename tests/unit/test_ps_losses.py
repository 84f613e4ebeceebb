"""Losses of shares, added up as the chief does, against Keras' loss of the joined batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.shares import bounds
from tfdist.ps import work
from tfdist.trainers.ps_losses import ShareLoss, ShareTracker
from tfdist.trainers.swap import swap

ROWS, STEPS = 7, 4
RANDOM = np.random.default_rng(0)
Y = RANDOM.normal(size=(ROWS, STEPS, 2)).astype("float32")
PREDICTED = RANDOM.normal(size=(ROWS, STEPS, 2)).astype("float32")
MASK = np.arange(STEPS) < np.array([1, 4, 2, 3, 4, 1, 2])[:, None]
WEIGHTS = np.linspace(0.2, 3, ROWS, dtype="float32")[:, None]


def call(loss, rows, weighted, masked):
    predicted = tf.constant(PREDICTED[rows])
    if masked:
        predicted._keras_mask = tf.constant(MASK[rows])
    return loss(tf.constant(Y[rows]), predicted, sample_weight=tf.constant(WEIGHTS[rows]) if weighted else None)


def in_shares(loss, workers, weighted, masked):
    """(sum over shares of weight x loss, how many were divided by something else than their samples)."""
    values, weights, other = [], [], 0
    for worker in range(workers):
        low, high = bounds(ROWS, worker, workers)
        collected = work.Collected(None, None, tf.constant((high - low) / ROWS, tf.float32))
        with work._collecting(collected):
            values.append(float(call(loss, slice(low, high), weighted, masked)))
        assert collected.losses == 1
        other += collected.divisor is not None
        weights.append(high - low if collected.divisor is None else float(collected.divisor))
    return np.dot(values, weights) / sum(weights), other


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"])
def test_shares_add_up(reduction, weighted, masked, workers):
    plain = float(call(keras.losses.MeanSquaredError(reduction), slice(None), weighted, masked))
    loss = keras.losses.MeanSquaredError(reduction)
    swap(loss, ShareLoss)
    assert float(call(loss, slice(None), weighted, masked)) == plain  # outside of a worker's step
    total, other = in_shares(loss, workers, weighted, masked)
    assert total == pytest.approx(plain, rel=1e-5)
    divided = reduction != "sum" and (masked or (weighted and reduction == "mean_with_sample_weight"))
    assert other == (workers if divided else 0)
    assert loss.reduction == reduction


def test_a_share_whose_mask_leaves_nothing():
    loss = keras.losses.MeanSquaredError()
    swap(loss, ShareLoss)
    collected = work.Collected(None, None, tf.constant(0.5))
    predicted = tf.constant(PREDICTED)
    predicted._keras_mask = tf.zeros((ROWS, STEPS), tf.bool)
    with work._collecting(collected):
        assert float(loss(tf.constant(Y), predicted)) == 0.0
    assert float(collected.divisor) == 0.0


def test_a_batch_counts_once_in_the_mean_of_an_output():
    tracker = keras.metrics.Mean()
    swap(tracker, ShareTracker)
    for share, value in ((0.25, 1.0), (0.75, 3.0)):
        with work._collecting(work.Collected(None, None, tf.constant(share))):
            tracker.update_state(tf.constant(value))
    tracker.update_state(5.0)  # a batch of its own
    assert float(tracker.count) == 2.0
    assert float(tracker.result()) == pytest.approx((2.5 + 5.0) / 2)
