"""A model's step on other values than its own: pure in the variables, so that any worker can run it.

`keras.StatelessScope` answers reads of Keras variables from a mapping and keeps writes to itself. A gradient tape,
however, wants a variable's handle; so every trainable variable is stood in for by a variable of the worker's own,
which lives in the worker's memory under a name and is filled anew in each step. The filling copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import private


def run(
    step: Callable[[], Any],
    trainable: Sequence[tuple[Any, tf.Tensor]],
    others: Sequence[tuple[Any, tf.Tensor]],
    name: str,
    anchors: Sequence[tuple[Any, Any]],
    alive: list[Any],
) -> tuple[Any, list[tf.Tensor]]:
    """Calls `step` in a graph, with values for the variables it reads.

    Args:
        step: a function of no argument, such as a model's `train_step` on a batch.
        trainable: (Keras variable, its value); gradients can be taken of these.
        others: (Keras variable, its value); what `step` writes into these is returned.
        name: prefix of the names in the worker's memory, one for each model.
        anchors: (Keras variable, what stands in for it) of tables whose values are not there; see `tables`.
        alive: gets what must live as long as the graph does.

    Returns:
        what `step` returned, and the values of `others` after it.
    """
    scope = keras.StatelessScope(state_mapping=list(others), collect_losses=True)
    for index, (variable, value) in enumerate(trainable):
        scope.state_mapping[id(variable)] = private.local_variable(f"{name}.{index}", value)
    for variable, anchor in anchors:
        scope.state_mapping[id(variable)] = anchor
    alive.append(scope)
    with scope:
        result = step()
        after = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable, _ in others]
    return result, after
