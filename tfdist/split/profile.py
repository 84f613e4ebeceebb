"""How long each operation of a model takes, forwards and backwards, and copies between devices, by trying."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.split.network import Network, Operation

REPEATS = 5  # after a first run, which sets things up
BLOCK = 4 * 2**20  # bytes that are copied to measure a link
UNKNOWN = 32  # elements of a dimension that the model leaves open, the batch's among them


def times(network: Network, device: str, batch: int = UNKNOWN) -> list[tuple[float, float]]:
    """Median seconds of forward and of backward of each operation, on random input; the model stays as it is.

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
                runs = [_once(operation, tensors) for _ in range(REPEATS + 1)]
            except Exception as error:
                raise ValueError(
                    f"layer {operation.name!r} could not be timed on made-up input of {batch} samples ({error}). "
                    'Use balance="parameters", or say how many operations each stage gets.'
                ) from error
            tensors.update(zip(operation.gives, runs[-1][2], strict=True))
            found.append((statistics.median(r[0] for r in runs[1:]), statistics.median(r[1] for r in runs[1:])))
    return found


def bytes_per_second(one: str, other: str) -> float:
    """Of a copy from one device to another, by trying."""
    with tf.device(one):
        block = tf.zeros(BLOCK // 4)
    spent = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        with tf.device(other):
            _wait(tf.identity(block))
        spent.append(time.perf_counter() - began)
    return BLOCK / statistics.median(spent[1:])


def _once(operation: Operation, tensors: dict[int, Any]) -> tuple[float, float, list[Any]]:
    """Seconds of one forward, of one backward, and what the operation gave."""
    sources = [tensors[t] for t in operation.takes if tensors[t].dtype.is_floating]
    began = time.perf_counter()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        given = private.call_node(operation.node, tensors, training=True)
    for tensor in given:
        _wait(tensor)
    turned = time.perf_counter()
    targets = [t for t in given if t.dtype.is_floating]
    sources += [v.value for v in operation.variables if v.trainable]
    for gradient in tape.gradient(targets, sources) if targets and sources else []:
        _wait(gradient)
    return turned - began, time.perf_counter() - turned, given


def _wait(tensor: Any) -> None:
    """A device computes on while Python goes ahead; one element of the result is there when all is."""
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tensor.values
    if tensor is not None:
        tf.reshape(tf.convert_to_tensor(tensor), [-1])[:1].numpy()


def _made_up(symbol: Any, batch: int) -> tf.Tensor:
    first, *rest = symbol.shape
    shape = [batch if first is None else first, *(UNKNOWN if size is None else size for size in rest)]
    dtype = tf.as_dtype(symbol.dtype)
    return tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)
