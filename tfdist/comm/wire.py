"""Which element types Horovod carries, and how the others are dressed for the way.

Horovod 0.28.1 reduces {u8, i8, i32, i64, f16, f32, f64} and moves also {u16, i16, bool}. A type outside goes as
a wider one (reductions: bfloat16 as float32) or as its bits (moves: bfloat16 as int16), and comes back as itself.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

Back = Callable[[tf.Tensor], tf.Tensor]

_REDUCED = {
    tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64,
}  # fmt: skip
_REDUCED_AS = {
    tf.bfloat16: tf.float32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}
_MOVED = _REDUCED | {tf.uint16, tf.int16, tf.bool}
_MOVED_AS_BITS = {
    tf.bfloat16: tf.int16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,  # adds an axis of 2 at the end
    tf.complex128: tf.float64,
}
_LINEAR = ("sum", "mean")


def for_reduction(tensor: tf.Tensor, op: str, name: str) -> tuple[tf.Tensor, Back]:
    """The tensor to hand to a reduction and the function that turns its result back.

    Raises:
      ValueError: the reduction does not exist for the element type.
    """
    dtype = tensor.dtype
    if op in ("mean", "adasum") and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(f"{op} {name!r}: the tensor is {dtype.name}; {op} needs floating point: cast it, or use 'sum'")
    if dtype in _REDUCED:
        return tensor, tf.identity
    if dtype == tf.bool and op in ("min", "max"):
        return tf.cast(tensor, tf.uint8), lambda t: tf.cast(t, tf.bool)
    if dtype in _REDUCED_AS:
        return tf.cast(tensor, _REDUCED_AS[dtype]), lambda t: tf.cast(t, dtype)
    if dtype.is_complex and op in _LINEAR:
        return tf.bitcast(tensor, _MOVED_AS_BITS[dtype]), lambda t: tf.bitcast(t, dtype)
    known = ", ".join(sorted(t.name for t in _REDUCED | set(_REDUCED_AS)))
    raise ValueError(
        f"{op} {name!r}: a tensor of {dtype.name} cannot be reduced; {op} takes {known}"
        + (", complex64, complex128" if op in _LINEAR else "")
        + (", bool" if op in ("min", "max") else " (bool has 'any' and 'all')")
    )


def for_move(tensor: tf.Tensor, name: str) -> tuple[tf.Tensor, Back]:
    """The tensor to gather or broadcast and the function that turns its result back; bits are kept.

    Raises:
      ValueError: the element type cannot travel.
    """
    dtype = tensor.dtype
    if dtype in _MOVED:
        return tensor, tf.identity
    if dtype in _MOVED_AS_BITS:
        return tf.bitcast(tensor, _MOVED_AS_BITS[dtype]), lambda t: tf.bitcast(t, dtype)
    known = ", ".join(sorted(t.name for t in _MOVED | set(_MOVED_AS_BITS)))
    raise ValueError(f"{name!r}: a tensor of {dtype.name} cannot be sent; known are {known}")
