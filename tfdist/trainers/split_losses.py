"""Losses of micro-batches under "1f1b", where each has one of its own; see `split.pipeline`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.trainers import losses
from tfdist.trainers.step import current

_here = threading.local()


@dataclass
class Part:
    """The micro-batch whose loss is being traced.

    Attributes:
      share: its part of the batch's samples.
      divisor: what the loss was divided by, where it is not the number of samples.
      losses: how many were computed.
    """

    share: tf.Tensor
    divisor: tf.Tensor | None = None
    losses: int = 0


def _part() -> Part | None:
    return getattr(_here, "part", None)


class MicroLoss(losses.PartLoss):
    """Mixed into each `keras.losses.Loss` of a model."""

    _tfdist_part = staticmethod(_part)
    _tfdist_parts = "each micro-batch"


class MicroTracker(losses.OutputLossTracker):
    """Mixed into the mean that Keras keeps for each of several outputs: a batch counts once, on all ranks together."""

    @staticmethod
    def _tfdist_weight() -> Any:
        part, rank = _part(), losses.OutputLossTracker._tfdist_weight()
        if part is None or rank is None:
            return rank if part is None else part.share
        return part.share * rank


def adopt(model: Any) -> None:
    """Makes the losses of a model fit for micro-batches, those of `compile` once they are built."""
    losses.adopt(model, MicroLoss, MicroTracker)


def of_part(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, share: Any) -> tuple[tf.Tensor, Any]:
    """The model's loss of a micro-batch, or (share None) of a batch, and what it was divided by if not by samples.

    Raises:
      ValueError: the model has several losses, one of them masked or weighted.
    """
    if share is None:
        return _loss(model, x, y, y_pred, sample_weight), None
    _here.part = part = Part(share)
    try:
        loss = _loss(model, x, y, y_pred, sample_weight)
    finally:
        _here.part = None
    if loss.shape.rank != 0:
        raise ValueError(
            f"the loss of model {model.name!r} has shape {loss.shape}: how those of micro-batches add up is not known. "
            "Give it a reduction, or use schedule='gpipe', which takes one loss of the whole batch."
        )
    if part.divisor is not None and part.losses > 1:
        raise ValueError(
            f"Model {model.name!r} has {part.losses} losses, one of them divided by its valid or weighted positions: "
            "micro-batches cannot be added up before all are there. Use schedule='gpipe', which takes one loss of the "
            "whole batch."
        )
    step = current()
    if part.divisor is not None and step is not None and step.reduce_op == "mean":
        # As `losses.GlobalLoss`: what a rank's loss will be multiplied by is taken off, and the divisor is the ranks'.
        loss = tf.math.divide_no_nan(loss, tf.cast(step.weight, loss.dtype))
    return loss, part.divisor


def agreed(divisor: tf.Tensor) -> tf.Tensor:
    """What the loss of a batch is divided by, from what this process' part of it would be: on a ring the ranks' sum."""
    step = current()
    if step is None or step.reduce_op != "mean":
        return divisor
    return step.comm.all_reduce(step.silenced(divisor), step.name("divisor"), "sum")


def _loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    if private.compile_loss(model) is None and type(model).compute_loss is keras.Model.compute_loss:
        return tf.zeros(())  # it trains on the losses of its layers alone
    return model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
