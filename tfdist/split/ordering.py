"""Gradients of activations first, those of weights after: the stage before waits for the former only.

TensorFlow runs what is ready in any order, and in the backward of a layer both are ready at once::

    dy3 --> dx3 --> dx2 --> dx1 --> to the stage before
     |       |       |
     dw3     dw2     dw1            these wait until dx1 is done
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist import private

REWRITTEN = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")


def operations() -> int:
    """How many the graph has that is being built; what `weights_last` starts at."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def weights_last(mark: int, below: Sequence[tf.Tensor]) -> None:
    """Makes what was added to the graph since `mark`, and `below` does not need, run when `below` is there.

    Without a graph everything has run already.
    """
    if tf.executing_eagerly() or not below:
        return
    ends = [tensor.op for tensor in tf.nest.flatten(list(below), expand_composites=True)]
    every = tf.compat.v1.get_default_graph().get_operations()
    added = set(every[mark:])
    # The gradient of a loop or branch gives the loop itself new inputs, so what it needs can lie behind older ones.
    inside = set(every) if any(operation.type in REWRITTEN for operation in every[:mark]) else added
    needed, reached = set(), list(ends)
    while reached:
        operation = reached.pop()
        if operation in inside and operation not in needed:
            needed.add(operation)
            reached += [t.op for t in operation.inputs] + list(operation.control_inputs)
    # Constants cost nothing, and held back could not be folded.
    others = {operation for operation in added if operation not in needed and operation.inputs}
    for operation in others:
        if not any(t.op in others for t in operation.inputs):
            private.wait_for(operation, ends)
