"""Micro-batches: a batch in parts, and what each has on its way through the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist import private
from tfdist.data.share import cut_rows, rows, with_ghost
from tfdist.data.shares import bounds
from tfdist.split.network import Network
from tfdist.split.stages import Tensors


@dataclass(frozen=True)
class Taken:
    """What a forward took, for it to be computed again before its backward."""

    arrived: Tensors
    starts: list[tuple[Any, Any]]  # state before it


@dataclass(frozen=True)
class Recorded:
    """A forward that can be differentiated."""

    tape: tf.GradientTape
    below: Tensors  # what it took from other stages
    targets: list[tuple[int | None, tf.Tensor]]  # symbol (None: a loss), and the tensor to differentiate


@dataclass
class Micro:
    """A micro-batch under way.

    Attributes:
      share: its part of the batch's samples, a float32 scalar.
      count: its samples; None where it has one at least. One of none computes on a row that counts for nothing, since
        not every kernel takes no rows.
      tensors: on its way forwards, by symbol.
      taken, recorded: what forwards have left for their backwards, by stage: one of the two.
      gradients: on their way back, by symbol.
    """

    batch: tuple[Any, Any, Any]  # x, y, sample_weight
    share: tf.Tensor
    count: Any
    tensors: Tensors
    taken: dict[int, Taken] = field(default_factory=dict)
    recorded: dict[int, Recorded] = field(default_factory=dict)
    gradients: dict[int, list[tf.Tensor]] = field(default_factory=dict)


def cut(network: Network, batch: tuple[Any, Any, Any], count: int) -> list[Micro]:
    """A batch (x, y, sample_weight) of any length in `count` parts, as even as can be."""
    flat = private.standard_inputs(network.functional, batch[0])
    first = next(t for t in flat if t is not None)
    total = first.shape[0] or rows(first)
    full = first.shape[0] is not None and total >= count
    micros = []
    for i in range(count):
        low, high = bounds(total, i, count)
        share = tf.cast(high - low, tf.float32) / tf.cast(total, tf.float32)
        samples = None if full else high - low
        if not full:
            low, high = with_ghost(low, high, total)
        tensors = dict(zip(network.inputs, cut_rows(flat, low, high), strict=True))
        micros.append(Micro(cut_rows(batch, low, high), share, samples, tensors))
    return micros


def joined(parts: list[tf.Tensor], micros: list[Micro]) -> tf.Tensor:
    """Micro-batches' tensors as the batch's, masks with them."""

    def together(each: list[tf.Tensor]) -> tf.Tensor:
        return tf.concat([t if m.count is None else t[: m.count] for t, m in zip(each, micros, strict=True)], axis=0)

    whole = together(parts)
    masks = [private.mask_of(part) for part in parts]
    if masks[0] is not None:
        private.set_mask(whole, together(masks))
    return whole
