"""Values that steps read and never write, such as frozen layers' weights: a worker fetches them once and keeps them.

They lie on the ps tasks, whole, and carry a stamp. A call brings the stamp that counts; a worker whose values have
another one fetches them first.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.ps.part import Part
from tfdist.ps.pieces import size_of

_stamps = itertools.count(1)  # one is never used twice in a process, for any model


class Held:
    """Variables of the chief that no step writes.

    Args:
      parts: of the store.
      variables: Keras variables.
      name: prefix of the names in a worker's memory; the same for a model whenever it is set up anew.

    Attributes:
      stamp: of the values on the ps tasks.
    """

    def __init__(self, parts: Sequence[Part], variables: Sequence[Any], name: str) -> None:
        self.variables, self._name = list(variables), name
        self.stamp = 0
        self._sums: list[int] = []
        self._kept: list[tf.Variable] = []
        load = [0] * len(parts)
        for variable in self.variables:
            j = min(range(len(parts)), key=lambda k: load[k])
            load[j] += size_of(variable)
            with tf.device(parts[j].device):
                self._kept.append(tf.Variable(variable.value, trainable=False))

    def load(self) -> None:
        """The chief's values to the ps tasks, if they are others than the last time."""
        sums = [zlib.crc32(memoryview(variable.numpy()).cast("B")) for variable in self.variables]
        if sums != self._sums:
            self._sums, self.stamp = sums, next(_stamps)
            for kept, variable in zip(self._kept, self.variables, strict=True):
                kept.assign(variable.value)

    def here(self, stamp: tf.Tensor) -> list[tf.Tensor]:
        """In a worker's graph: the values, fetched where the worker's own have another stamp."""
        if not self.variables:
            return []
        ops = tf.raw_ops
        places = [
            ops.VarHandleOp(dtype=kept.dtype, shape=kept.shape, shared_name=f"{self._name}.{i}", container="")
            for i, kept in enumerate(self._kept)
        ]
        mark = ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"{self._name}.stamp", container="")

        def fetch() -> tf.Tensor:
            filled = []
            for place, kept in zip(places, self._kept, strict=True):
                with tf.device(kept.device):
                    value = kept.read_value()
                filled.append(ops.AssignVariableOp(resource=place, value=value))
            with tf.control_dependencies(filled):
                ops.AssignVariableOp(resource=mark, value=stamp)
            return tf.constant(True)

        known = tf.cond(
            ops.VarIsInitializedOp(resource=mark),
            lambda: tf.equal(ops.ReadVariableOp(resource=mark, dtype=tf.int64), stamp),
            lambda: tf.constant(False),
        )
        with tf.control_dependencies([tf.cond(known, lambda: tf.constant(True), fetch)]):
            return [
                tf.ensure_shape(ops.ReadVariableOp(resource=place, dtype=kept.dtype), kept.shape)
                for place, kept in zip(places, self._kept, strict=True)
            ]
