"""Clips a gradient that lies on several ps tasks in pieces, as Keras clips a whole one.

Only sums of squares go from one to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm import fusion, sparse
from tfdist.ps.layout import Holding


def clipped(optimizer: Any, parts: Sequence[Any], gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The gradients, by part and holding, clipped by the optimizer's clipnorm, global_clipnorm or clipvalue."""
    if limit := optimizer.clipvalue:  # 0 is none, as in Keras
        return _mapped(parts, gradients, lambda holding, piece, values: tf.clip_by_value(values, -limit, limit))
    if not (limit := optimizer.clipnorm or optimizer.global_clipnorm):
        return [list(mine) for mine in gradients]
    squares: dict[int, list[tf.Tensor]] = {}

    def measure(holding: Holding, variable: int, values: tf.Tensor) -> tf.Tensor:
        squares.setdefault(variable, []).append(tf.reduce_sum(tf.square(tf.cast(values, tf.float32))))
        return values

    _mapped(parts, gradients, measure)
    if not optimizer.clipnorm:
        whole = tf.add_n([s for of_one in squares.values() for s in of_one])
        norms = dict.fromkeys(squares, tf.sqrt(whole))
    else:
        norms = {variable: tf.sqrt(tf.add_n(of_one)) for variable, of_one in squares.items()}

    def scale(holding: Holding, variable: int, values: tf.Tensor) -> tf.Tensor:
        norm = norms[variable]
        return values * tf.cast(tf.where(norm > limit, limit / norm, 1.0), values.dtype)

    return _mapped(parts, gradients, scale)


def _mapped(parts: Sequence[Any], gradients: Sequence[Sequence[Any]], change: Any) -> list[list[Any]]:
    """`change(holding, variable, values)` done to every piece, where it is."""
    result = []
    for part, mine in zip(parts, gradients, strict=True):
        with tf.device(part.device):
            result.append([_changed(h, g, change) for h, g in zip(part.holdings, mine, strict=True)])
    return result


def _changed(holding: Holding, gradient: Any, change: Any) -> Any:
    if holding.deal or holding.alone:
        return sparse.on_values(gradient, lambda values: change(holding, holding.pieces[0].variable, values))
    pieces = fusion.unpack(gradient, [(p.stop - p.start,) for p in holding.pieces])
    return fusion.pack([change(holding, p.variable, v) for p, v in zip(holding.pieces, pieces, strict=True)])
