"""Weights of one layer in parts on several devices.

The layer, the model and files know one Keras variable, as ever: it has its name and shape, is read as one tensor and
assigned as one. Its value is that of *parts*, each a Keras variable on its device; stages, gradients and the optimizer
deal with those::

    kernel (4, 5), axis 1      part 0: columns [0, 2)      part 1: columns [2, 5)
                               on /GPU:0                   on /GPU:1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist import private_variables
from tfdist.data.shares import bounds


class Parts:
    """The value of a Keras variable that is kept in parts; as far as it is asked for, like the `tf.Variable` it was.

    Args:
      variables: the parts, in order.
      axis: along which they are joined.
      like: of which it has the name, and by which optimizers know it; a `tf.Variable`.
    """

    def __init__(self, variables: Sequence[Any], axis: int, like: Any) -> None:
        self.variables, self.axis = list(variables), axis
        self.name, self._unique_id, self._shared_name = like.name, like._unique_id, like._shared_name
        self.dtype, self.trainable = like.dtype, like.trainable
        self.device = self.variables[0].value.device
        sizes = [v.shape[axis] for v in self.variables]
        self.ends = np.cumsum(sizes).tolist()
        whole = list(self.variables[0].shape)
        whole[axis] = self.ends[-1]
        self.shape = tf.TensorShape(whole)

    def pieces(self) -> Iterator[tuple[Any, tuple[slice, ...]]]:
        """Each part, and where it is in the whole."""
        for start, end, variable in zip([0, *self.ends], self.ends, self.variables, strict=False):
            yield variable, (slice(None),) * self.axis + (slice(start, end),)

    def assign(self, value: Any) -> None:
        """Each part gets what is its own of a value of the whole's shape: an array, a tensor or a file's data set."""
        for variable, where in self.pieces():
            with tf.device(variable.value.device):
                variable.assign(value[where])

    def numpy(self) -> np.ndarray:
        """The whole, put together in host memory."""
        return np.concatenate([v.numpy() for v in self.variables], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype) if dtype is not None else self.numpy()

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        joined = tf.concat([tf.convert_to_tensor(v.value) for v in self.variables], self.axis)
        return tf.convert_to_tensor(joined, dtype, name=name)

    def __getitem__(self, where: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self)[where]


class Part(keras.Variable):
    """One part of a variable; as trainable as that is at the moment. Its value is never cast for the layer's call."""

    def __init__(self, whole: Any, value: tf.Variable) -> None:
        self._whole = whole
        super().__init__(value, dtype=value.dtype.name, autocast=False, name=whole.name)
        private_variables.become(self, value, whole.path)
        self.regularizer = whole.regularizer
        self.constraint = _there(whole.constraint, value.device)

    @property
    def whole(self) -> Any:
        """The variable it is a part of."""
        return self._whole

    @property
    def trainable(self) -> bool:
        return self._whole.trainable


class Whole:
    """Mixed into a Keras variable whose value is `Parts`."""

    def assign(self, value: Any) -> Any:
        if not hasattr(value, "shape"):
            value = np.asarray(value)
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(
                f"{self.path} has shape {tuple(self.shape)}, but was assigned a value of shape {tuple(value.shape)}."
            )
        private_variables.held_by(self).assign(value)
        return value

    @property
    def regularizer(self) -> Any:
        rule = super().regularizer
        return None if rule is None else lambda _: total(rule, private_variables.held_by(self).variables)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{self.path} is held in parts on several devices and cannot be exported. Save the model with model.save, "
            "load the file with keras.models.load_model, and export that."
        )


def total(rule: Callable[[Any], tf.Tensor], variables: Sequence[Any]) -> tf.Tensor:
    """The loss of weights that adds up over parts, each computed where it is."""
    losses = []
    for variable in variables:
        with tf.device(variable.value.device):
            losses.append(rule(variable))
    return tf.add_n(losses)


def _there(rule: Any, device: str) -> Any:
    if rule is None:
        return None

    def constrained(variable: Any) -> Any:
        with tf.device(device):
            return rule(variable)

    return constrained


def parts_of(variable: Any) -> list[Any]:
    """A variable's parts, or itself alone."""
    held = private_variables.held_by(variable) if isinstance(variable, keras.Variable) else None
    return held.variables if isinstance(held, Parts) else [variable]


def is_whole(variable: Any) -> bool:
    """Whether a variable is kept in parts."""
    return isinstance(private_variables.held_by(variable), Parts)


def expanded(variables: Iterable[Any]) -> list[Any]:
    """Variables, with their parts in place of those that have some."""
    return [part for variable in variables for part in parts_of(variable)]


def cut(value: Any, devices: Sequence[str], axis: int) -> list[tf.Variable]:
    """The value of a Keras variable, a `tf.Variable`, as one for each device."""
    whole = value.numpy()
    found = []
    for i, device in enumerate(devices):
        start, end = bounds(whole.shape[axis], i, len(devices))
        piece = whole[(slice(None),) * axis + (slice(start, end),)]
        found.append(private_variables.elsewhere(value, piece, device))
    return found


def placed(device: str, function: Callable[..., tf.Tensor], *tensors: tf.Tensor) -> tf.Tensor:
    """`function(*tensors)`, computed on a device, and its gradients too.

    A tape's gradients are computed where they are asked for; these take a part's device with them.
    """

    @tf.custom_gradient
    def run(*given: tf.Tensor) -> Any:
        # Persistent: who asks for gradients of inputs and of weights apart, asks twice.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([t for t in given if t.dtype.is_floating])
            result = function(*given)

        def gradient(upstream: tf.Tensor) -> list[Any]:
            with tf.device(device):
                return tape.gradient(result, list(given), output_gradients=upstream)

        return result, gradient

    with tf.device(device):
        return run(*tensors)
