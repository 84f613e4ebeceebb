"""Losses whose mean over the joined batch is no weighted mean of the ranks' means.

Keras divides a masked loss by the *valid* positions, `mean_with_sample_weight` by the sum of weights, and
`reduction="sum"` by nothing. For those the ranks agree on the divisor D of the joined batch, and each
contributes S_r / (D w_r): after the weight w_r that every loss of a rank gets, the sum over ranks is
(sum of S_r) / D, which is what one process computes.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.trainers.step import current
from tfdist.trainers.swap import swap

MEANS = ("sum_over_batch_size", "mean")
WEIGHTED = "mean_with_sample_weight"
MEND = (
    "ModelParallelStrategy(schedule='gpipe') takes one loss of the whole batch; else let the loss give a value for "
    "each sample."
)


class Noting:
    """Notes what `call` leaves on a loss' values: a mask, as `ignore_class` does, which only shows afterwards."""

    def call(self, y_true, y_pred):
        values = super().call(y_true, y_pred)
        self.__dict__["_tfdist_noted"] = (private.mask_of(values), getattr(values, "shape", tf.TensorShape(None)).rank)
        return values

    def _tfdist_as_it_is(self, y_true, y_pred, sample_weight, parts):
        """The loss by its own reduction, or None where it is a mean over what only its own mask shows.

        One number for a whole batch is told of: `parts` says of what.
        """
        loss = super().__call__(y_true, y_pred, sample_weight)
        mask, rank = self.__dict__.pop("_tfdist_noted", (None, None))
        if rank == 0:
            tell_of_one_number(self, parts, sample_weight)
        return loss if mask is None or self.reduction not in (*MEANS, WEIGHTED) else None

    def _tfdist_values(self, y_true, y_pred, sample_weight):
        """Before reduction, with the mask of the predictions and of the loss itself."""
        reduction, self.reduction = self.reduction, None
        try:
            values = super().__call__(y_true, y_pred, sample_weight)
        finally:
            self.reduction = reduction
        masks = [m for m in (private.mask_of(y_pred), self.__dict__.pop("_tfdist_noted")[0]) if m is not None]
        return values, masks[0] & masks[1] if len(masks) == 2 else (masks or [None])[0]


class GlobalLoss(Noting):
    """Mixed into each `keras.losses.Loss` of a distributed model's `compile`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        step = current()
        if step is None or step.reduce_op != "mean":
            return super().__call__(y_true, y_pred, sample_weight)
        if not needs_divisor(self.reduction, y_pred, sample_weight):
            loss = self._tfdist_as_it_is(y_true, y_pred, sample_weight, "each rank's share")
            if loss is not None:
                return loss
        values, mask = self._tfdist_values(y_true, y_pred, sample_weight)
        total = tf.reduce_sum(values)
        # A ghost has weight 0 and contributes nothing; dividing by it would make a NaN of that.
        contribution = tf.math.divide_no_nan(total, tf.cast(step.weight, total.dtype))
        if self.reduction == "sum":
            return contribution
        mine = divisor(self.reduction, values, mask, sample_weight)
        agreed = step.comm.all_reduce(step.silenced(tf.stop_gradient(mine)), step.name("divisor"), "sum")
        return tf.math.divide_no_nan(contribution, tf.cast(agreed, total.dtype))


class PartLoss(Noting):
    """Mixed into a loss of a part of a batch, to be weighed by its part of the samples, or by a divisor if it has one.

    `_tfdist_part` gives the part: with `share` (of the samples), `divisor` and `losses` (how many were computed); None
    where there is none.
    """

    def __call__(self, y_true, y_pred, sample_weight=None):
        part = self._tfdist_part()
        if part is None:
            return super().__call__(y_true, y_pred, sample_weight)
        part.losses += 1
        if not needs_divisor(self.reduction, y_pred, sample_weight):
            loss = self._tfdist_as_it_is(y_true, y_pred, sample_weight, self._tfdist_parts)
            if loss is not None:
                return loss
        if self.reduction == "sum":  # of which a part will be taken, and on a ring the rank's weight
            total = super().__call__(y_true, y_pred, sample_weight)
            return tf.math.divide_no_nan(total, tf.cast(part.share, total.dtype))
        values, mask = self._tfdist_values(y_true, y_pred, sample_weight)
        total = tf.reduce_sum(values)
        part.divisor = tf.stop_gradient(divisor(self.reduction, values, mask, sample_weight))
        return tf.math.divide_no_nan(total, tf.cast(part.divisor, values.dtype))


def tell_of_one_number(loss: Any, parts: str, sample_weight: Any) -> None:
    """Warns of a loss that gives one number for a batch: what that of the whole is, its parts do not say."""
    name = getattr(loss, "name", type(loss).__name__)
    known = isinstance(loss, (keras.losses.Dice, keras.losses.Tversky))
    if known or sample_weight is not None:
        why = "is no mean over samples" if known else "is weighted by samples after it was averaged"
        what = f"is not the loss of the whole batch. {MEND}"
    else:
        why = "gives one number for a batch"
        what = f"is the loss of the whole batch only if that number is a mean over samples. If it is not: {MEND}"
    warnings.warn(f"The loss {name!r} {why}, so what is taken of {parts} {what}", stacklevel=2)


def needs_divisor(reduction: Any, y_pred: Any, sample_weight: Any) -> bool:
    """Whether a loss is divided by something else than the number of samples, or by nothing."""
    if reduction == "sum":
        return True
    if reduction == WEIGHTED:
        return sample_weight is not None or private.mask_of(y_pred) is not None
    if reduction not in MEANS:
        return False
    shape = getattr(y_pred, "shape", None)
    ragged_rows = shape is not None and shape.rank is not None and None in list(shape)[1:]
    return private.mask_of(y_pred) is not None or ragged_rows


def divisor(reduction: str, values: tf.Tensor, mask: Any, sample_weight: Any) -> tf.Tensor:
    """What Keras would divide the sum of these values by, float32 scalar."""
    size = tf.cast(tf.size(values), tf.float32)
    if reduction == WEIGHTED:
        weight = private.merged_weight(sample_weight, mask, tf.float32)
        return tf.reduce_sum(tf.cast(weight, tf.float32))
    if mask is None:
        return size
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    return valid * size / tf.cast(tf.size(mask), tf.float32)


class Tracker:
    """Mixed into the mean that Keras keeps for each of several outputs.

    Keras counts a batch of unknown size as one; so that the parts of it count as one together, each counts its
    weight: `_tfdist_weight`, None where there is none.
    """

    def update_state(self, values, sample_weight=None):
        if sample_weight is None:
            sample_weight = self._tfdist_weight()
        return super().update_state(values, sample_weight=sample_weight)


class OutputLossTracker(Tracker):
    """Of a rank's part."""

    @staticmethod
    def _tfdist_weight() -> Any:
        step = current()
        return step.weight if step is not None and step.reduce_op == "mean" else None


def adopt(model: keras.Model, loss_mixin: type = GlobalLoss, tracker_mixin: type = OutputLossTracker) -> None:
    """Makes a model's losses agree on their divisors: those of `compile`, once they are built, and its attributes."""
    for value in vars(model).values():
        if isinstance(value, keras.losses.Loss) and not isinstance(value, private.compile_loss_class()):
            swap(value, loss_mixin)
    compiled = private.compile_loss(model)
    if compiled is None or not getattr(compiled, "built", False):
        return
    for loss in private.flat_losses(compiled):
        if isinstance(loss, keras.losses.Loss):
            swap(loss, loss_mixin)
    for metric in compiled.metrics:
        swap(metric, tracker_mixin)
