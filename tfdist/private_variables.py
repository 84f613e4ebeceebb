"""The private side of Keras variables, and of what an optimizer knows of them; see `private`.

Nothing public gives a variable that exists another value, place or shape.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any


def place(variable: Any, device: str) -> None:
    """Moves a built Keras variable, with its value, to another device."""
    moved = elsewhere(variable.value, variable.value.numpy(), device)
    moved._unique_id = variable.value._unique_id  # by which an optimizer knows whether it decays
    variable._initialize(moved)


def elsewhere(variable: Any, value: Any, device: str) -> Any:
    """A `tf.Variable` of another value on another device, else as `variable`: by its full name, trainable or not."""
    tf = importlib.import_module("tensorflow")
    scope, _, name = variable.name.partition(":")[0].rpartition("/")
    with tf.device(device), tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
        return tf.Variable(
            tf.convert_to_tensor(value, variable.dtype),
            trainable=variable.trainable,
            name=name,
            aggregation=variable.aggregation,
            synchronization=variable.synchronization,
        )


def become(variable: Any, value: Any, path: str) -> None:
    """Gives a Keras variable a value of another shape, and another path."""
    variable._value, variable._shape, variable._ndim = value, tuple(value.shape), len(value.shape)
    variable._path = path


def held_by(variable: Any) -> Any:
    """What a Keras variable keeps as its value, whatever the scope."""
    return variable._value


def train_on(optimizer: Any, variables: list[Any]) -> None:
    """Tells a built optimizer that it is for other variables than it was built on; its slots are the caller's."""
    optimizer.__dict__["_trainable_variables"] = variables
    reindex(optimizer)


def list_variables(optimizer: Any, variables: list[Any]) -> None:
    """Gives an optimizer another list of its variables, which is what it saves."""
    optimizer.__dict__["_variables"] = variables
    chosen, _ = optimizer._tracker.config["variables"]
    optimizer._tracker.config["variables"] = (chosen, variables)


def reindex(optimizer: Any) -> None:
    """Tells a built optimizer that its variables, which it knows by TensorFlow's, are kept by others now."""
    if optimizer.built and hasattr(optimizer, "_trainable_variables_indices"):
        known = optimizer._trainable_variables
        optimizer._trainable_variables_indices = {optimizer._var_key(v): i for i, v in enumerate(known)}
