"""Fewer bytes on the wire for gradients.

A compression is any object with the two methods of `Compression`; pass it as `compression=` to the strategy.
It is applied to whole float32 buckets, never to the small facts that ride along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

AgreeMax = Callable[[tf.Tensor], tf.Tensor]


@runtime_checkable
class Compression(Protocol):
    """How a bucket is dressed for the wire. Traced into the step: use TensorFlow operations only."""

    def compress(self, flat: tf.Tensor, n_ranks: int, agree_max: AgreeMax) -> tuple[tf.Tensor, Any]:
        """Turns a float32 vector into what is summed over ranks, and a context for `decompress`.

        Every rank must choose the same element type and length. `agree_max(x)` gives the largest value over
        ranks of a small float32 vector `x`; each use costs a round of latency, and all ranks must make it.
        """
        ...

    def decompress(self, wire: tf.Tensor, context: Any) -> tf.Tensor:
        """Turns the sum over ranks of what `compress` gave into a float32 vector."""
        ...


class FP16:
    """16-bit floats, scaled by one power of two for all ranks so that the sum cannot overflow.

    With m the largest finite magnitude on any rank (one 4-byte all-reduce a bucket: a round of latency) and n
    ranks, the scale s is a power of two with 2^13 < n m s <= 2^15, half of float16's largest number. A value is
    rounded to 11 bits (2^-11 of it) when it is sent, and the sum again with each of the n - 1 additions on the way;
    numbers below 2^-14 / s lose bits, those below 2^-25 / s vanish. Powers of two pass exactly within these limits.
    Inf and NaN stay Inf and NaN.

    Gloo adds 16-bit floats in software: on links faster than about 0.3 GB/s (one machine) this costs more time than
    the bytes it spares.
    """

    def compress(self, flat: tf.Tensor, n_ranks: int, agree_max: AgreeMax) -> tuple[tf.Tensor, Any]:
        magnitude = tf.abs(flat)
        finite = tf.where(magnitude < float("inf"), magnitude, tf.zeros_like(magnitude))
        largest = agree_max(tf.reshape(tf.reduce_max(finite), [1]))[0]
        # The exponent field of the float: largest < 2^(exponent + 1). Exact, where a logarithm would round.
        exponent = tf.bitwise.right_shift(tf.bitcast(largest, tf.int32), 23) - 127
        headroom = 15 - (n_ranks - 1).bit_length()
        power = tf.clip_by_value(headroom - (exponent + 1), -126, 127)
        scale = tf.bitcast(tf.bitwise.left_shift(power + 127, 23), tf.float32)
        return tf.cast(flat * scale, tf.float16), scale

    def decompress(self, wire: tf.Tensor, context: Any) -> tf.Tensor:
        return tf.cast(wire, tf.float32) / context


_NAMED: dict[str, Callable[[], Compression]] = {"fp16": FP16}


def resolve(compression: str | Compression | None) -> Compression | None:
    """None, "fp16" or an object with `compress` and `decompress`, as an object or None.

    Raises:
      ValueError: anything else.
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        if compression not in _NAMED:
            known = ", ".join(map(repr, _NAMED))
            raise ValueError(f"unknown compression {compression!r}; known are None, {known}, or an object")
        return _NAMED[compression]()
    if isinstance(compression, type) or not isinstance(compression, Compression):
        raise ValueError(
            f"compression is {compression!r}; it needs the methods compress(flat, n_ranks, agree_max) and "
            "decompress(wire, context), see tfdist.comm.compression.Compression (pass an instance, not a class)"
        )
    return compression
