"""Losses of a share of a joined batch, for a parameter server whose workers train in step.

The chief adds up the shares' gradients, each times its weight: its part of the samples, or, where Keras divides a loss
by something else (valid positions of a mask, the sum of sample weights), its part of that::

    sum over shares of  d_i / D  x  S_i / d_i   =   (sum of S_i) / D
"""

from __future__ import annotations

from typing import Any

from tfdist.ps.work import current
from tfdist.trainers import losses


class ShareLoss:
    """Mixed into each `keras.losses.Loss` of a model."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        collected = current()
        if collected is None or collected.share is None:
            return super().__call__(y_true, y_pred, sample_weight)
        return losses.of_part(super().__call__, self, collected, y_true, y_pred, sample_weight)


class ShareTracker:
    """Mixed into the mean that Keras keeps for each of several outputs: a batch counts once, whatever its shares."""

    def update_state(self, values, sample_weight=None):
        collected = current()
        if collected is not None and collected.share is not None and sample_weight is None:
            sample_weight = collected.share
        return super().update_state(values, sample_weight=sample_weight)


def adopt(model: Any) -> None:
    """Makes the losses of a model fit for shares, those of `compile` once they are built."""
    losses.adopt(model, ShareLoss, ShareTracker)
