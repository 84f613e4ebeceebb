"""How long each operation of a model takes, forwards and backwards, by trying."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.split.network import Network, Operation

REPEATS = 5  # after a first run, which sets things up
UNKNOWN = 32  # elements of a dimension that the model leaves open, the batch's among them


def seconds(network: Network, device: str, batch: int = UNKNOWN) -> list[float]:
    """Median seconds of forward and backward of each operation, on random input; the model stays as it is.

    Args:
      device: to try it on; all are taken to be alike.
      batch: samples.

    Raises:
      ValueError: an operation does not work on made-up input.
    """
    found = []
    # Writes of layers (averages, seeds) stay in the scope.
    with tf.device(device), keras.StatelessScope():
        tensors = {id(t): _made_up(t, batch) for t in network.functional.inputs}
        for operation in network.operations:
            try:
                times, given = zip(*(_once(operation, tensors) for _ in range(REPEATS + 1)), strict=True)
            except Exception as error:
                raise ValueError(
                    f"layer {operation.name!r} could not be timed on made-up input of {batch} samples ({error}). "
                    'Use balance="parameters", or say how many operations each stage gets.'
                ) from error
            tensors.update(zip(operation.gives, given[-1], strict=True))
            found.append(statistics.median(times[1:]))
    return found


def _once(operation: Operation, tensors: dict[int, Any]) -> tuple[float, list[Any]]:
    """Seconds of one run, and what the operation gave."""
    sources = [tensors[t] for t in operation.takes if tensors[t].dtype.is_floating]
    began = time.perf_counter()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        given = private.call_node(operation.node, tensors, training=True)
    targets = [t for t in given if t.dtype.is_floating]
    sources += [v.value for v in operation.variables if v.trainable]
    for gradient in tape.gradient(targets, sources) if targets and sources else []:
        _wait(gradient)
    for tensor in given:
        _wait(tensor)
    return time.perf_counter() - began, given


def _wait(tensor: Any) -> None:
    """A device computes on while Python goes ahead; one element of the result is there when all is."""
    if tensor is not None:
        tf.reshape(tf.convert_to_tensor(tensor), [-1])[:1].numpy()


def _made_up(symbol: Any, batch: int) -> tf.Tensor:
    first, *rest = symbol.shape
    shape = [batch if first is None else first, *(UNKNOWN if size is None else size for size in rest)]
    dtype = tf.as_dtype(symbol.dtype)
    return tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)
