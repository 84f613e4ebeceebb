"""Puts what a call returns into one tensor of each element type: the chief fetches every tensor by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


class Form:
    """How the results of a model's calls are packed. Of all tensors but "facts" the shapes are always the same."""

    def __init__(self) -> None:
        self._like: Any = None

    def packed(self, result: dict[str, Any]) -> dict[str, tf.Tensor]:
        """In a graph: by the name of the type, everything of that type in a row; "facts" (one row each step) apart."""
        rest = {name: value for name, value in result.items() if name != "facts"}
        tensors = tf.nest.map_structure(tf.convert_to_tensor, rest)
        check(tf.nest.flatten(tensors))
        self._like = tf.nest.map_structure(lambda t: (t.dtype.name, tuple(t.shape)), tensors)
        rows: dict[str, list[tf.Tensor]] = {}
        for tensor in tf.nest.flatten(tensors):
            rows.setdefault(tensor.dtype.name, []).append(tf.reshape(tensor, [-1]))
        return {"facts": result["facts"], **{name: tf.concat(parts, 0) for name, parts in rows.items()}}

    def taken_apart(self, packed: dict[str, Any]) -> dict[str, Any]:
        """On the chief: what was given to `packed`, as numpy arrays."""
        at = dict.fromkeys(packed, 0)

        def one(like: tuple[str, tuple[int, ...]]) -> np.ndarray:
            name, shape = like
            size = math.prod(shape)
            at[name] += size
            return np.asarray(packed[name])[at[name] - size : at[name]].reshape(shape)

        return {"facts": np.asarray(packed["facts"]), **_mapped(one, self._like)}


def check(values: Iterable[Any]) -> None:
    """Raises ValueError where a value of the logs (a tensor or its spec) has no static shape."""
    shapes = [str(value.shape) for value in values if value.shape.num_elements() is None]
    if shapes:
        raise ValueError(
            f"The train_step returns values of shape {', '.join(shapes)}: under a parameter server logs need static "
            "shapes. Return scalars, such as means over the batch."
        )


def _mapped(function: Any, like: Any) -> Any:
    """As `tf.nest.map_structure`, for which a description would be a structure too."""
    if isinstance(like, dict):
        return {name: _mapped(function, like[name]) for name in sorted(like)}
    if isinstance(like, list):
        return [_mapped(function, value) for value in like]
    return function(like)
