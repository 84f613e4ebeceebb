"""Variables cut into what the ps tasks hold, and joined again: `layout` done to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.comm import fusion
from tfdist.ps.layout import Holding, Piece


def size_of(variable: Any) -> int:
    """Bytes of a Keras variable."""
    return fusion.nbytes(variable.value)


def gathered(holding: Holding, variables: Sequence[Any]) -> tf.Tensor:
    """A holding's tensor, from values by variable."""
    if holding.deal:
        return tf.convert_to_tensor(variables[holding.pieces[0].variable])[holding.ps :: holding.deal]
    if holding.alone:
        return tf.convert_to_tensor(variables[holding.pieces[0].variable])
    return fusion.pack(cut(holding, variables))


def cut(holding: Holding, tensors: Sequence[Any]) -> list[tf.Tensor]:
    """The pieces of a holding, flat, from tensors by variable."""
    found = []
    for piece in holding.pieces:
        flat = tf.reshape(tf.convert_to_tensor(tensors[piece.variable]), [-1])
        found.append(flat if piece.stop - piece.start == flat.shape[0] else flat[piece.start : piece.stop])
    return found


def parcels(holdings: Iterable[Holding], gradients: Sequence[Any]) -> list[Any]:
    """What a ps gets of gradients by variable: a tensor, or of a table rows, for each of its holdings."""
    found = []
    for holding in holdings:
        gradient = gradients[holding.pieces[0].variable]
        if holding.deal:
            mine = tf.where(tf.equal(gradient.indices % holding.deal, holding.ps))[:, 0]
            numbers = tf.gather(gradient.indices, mine) // holding.deal
            width = gradient.values.shape[1:]
            length = holding.pieces[0].stop // max(width.num_elements(), 1)
            shape = tf.constant([length, *width], tf.int64)
            found.append(tf.IndexedSlices(tf.gather(gradient.values, mine), tf.cast(numbers, tf.int64), shape))
        else:
            found.append(gradient if holding.alone else fusion.pack(cut(holding, gradients)))
    return found


class Joiner:
    """Collects what the ps tasks hold until the variables can be put together."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Holding, Piece, tf.Tensor]]] = {}

    def add(self, holding: Holding, value: tf.Tensor) -> None:
        if holding.alone or holding.deal:
            taken = [value]
        else:
            taken = fusion.unpack(value, [(p.stop - p.start,) for p in holding.pieces])
        for piece, part in zip(holding.pieces, taken, strict=True):
            self._found.setdefault(piece.variable, []).append((holding, piece, part))

    def variables(self) -> list[int]:
        """Of which something was added."""
        return sorted(self._found)

    def joined(self, variable: int, shape: Any) -> tf.Tensor:
        """The value of a variable, of this shape."""
        pieces = self._found[variable]
        if (deal := pieces[0][0].deal) > 0:
            rows = [tf.range(holding.ps, shape[0], deal) for holding, _, _ in pieces]
            return tf.dynamic_stitch(rows, [value for _, _, value in pieces])
        flat = [value for _, _, value in sorted(pieces, key=lambda p: p[1].start)]
        return tf.reshape(flat[0] if len(flat) == 1 else tf.concat(flat, axis=0), shape)
