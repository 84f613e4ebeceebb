"""Losses of a share of a joined batch, for a parameter server whose workers train in step.

The chief adds up the shares' gradients, each times its weight: its part of the samples, or, where Keras divides a loss
by something else (valid positions of a mask, the sum of sample weights), its part of that::

    sum over shares of  d_i / D  x  S_i / d_i   =   (sum of S_i) / D
"""

from __future__ import annotations

from typing import Any

from tfdist.ps.work import current
from tfdist.trainers import losses


def _share() -> Any:
    """The step of a share that is being traced, or None."""
    collected = current()
    return collected if collected is not None and collected.share is not None else None


class ShareLoss(losses.PartLoss):
    """Mixed into each `keras.losses.Loss` of a model."""

    _tfdist_part = staticmethod(_share)
    _tfdist_parts = "each worker's share"


class ShareTracker(losses.Tracker):
    """Mixed into the mean that Keras keeps for each of several outputs: a batch counts once, whatever its shares."""

    @staticmethod
    def _tfdist_weight() -> Any:
        collected = _share()
        return None if collected is None else collected.share


def adopt(model: Any) -> None:
    """Makes the losses of a model fit for shares, those of `compile` once they are built."""
    losses.adopt(model, ShareLoss, ShareTracker)
