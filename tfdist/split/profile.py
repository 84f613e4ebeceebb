"""How long each operation of a model takes, forwards and backwards, and copies between devices, by trying."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.split.network import Network, Operation
from tfdist.split.stages import copied

REPEATS = 5  # after a first run, which sets things up
BLOCK = 4 * 2**20  # bytes that are copied to measure a link
UNKNOWN = 32  # elements of a dimension that the model leaves open, the batch's among them


def times(network: Network, device: str | Sequence[str], batch: int = UNKNOWN) -> list[tuple[float, float]]:
    """Median seconds of forward and of backward of each operation, on random input; the model stays as it is.

    They are measured once for each number of samples.

    Args:
      device: to try it on; all are taken to be alike. Or one for each operation: where its weights are.
      batch: samples.

    Raises:
      ValueError: an operation does not work on made-up input.
    """
    if batch in network.timed:
        return network.timed[batch]
    places = [device] * len(network.operations) if isinstance(device, str) else list(device)
    with tf.device(places[0]):
        made_up = [_made_up(t, batch) for t in network.functional.inputs]
    run = tf.function(lambda *given: _stamps(network, places, given, batch), autograph=False)
    try:
        stamps = np.array([run(*made_up)[0].numpy() for _ in range(REPEATS + 1)])
    except tf.errors.OpError as error:
        raise ValueError(_untimed(f"model {network.name!r}", batch, error)) from error
    medians = np.median(np.diff(stamps[1:], axis=2), axis=0)
    network.timed[batch] = [(float(forward), float(backward)) for forward, backward in medians]
    return network.timed[batch]


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


def _stamps(
    network: Network, places: Sequence[str], given: Sequence[tf.Tensor], batch: int
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """In a graph: seconds at which each operation's forward begins, ends, and its backward ends; one after the other.

    In a graph, since eager calls of Python take longer than small operations. An element of each result is given
    besides: TensorFlow does not compute what is only waited for.
    """
    seen: list[tf.Tensor] = []
    tensors: dict[int, Any] = dict(zip(network.inputs, given, strict=True))
    after: list[tf.Tensor] = []
    rows = []
    with keras.StatelessScope():  # writes of layers (averages, seeds) stay in the scope
        for operation, place in zip(network.operations, places, strict=True):
            try:
                with tf.device(place):
                    row, outputs = _one(operation, place, tensors, after, seen)
            except Exception as error:
                raise ValueError(_untimed(f"layer {operation.name!r}", batch, error)) from error
            tensors.update(zip(operation.gives, outputs, strict=True))
            rows.append(tf.stack(row))
            after = [row[-1]]
    return tf.stack(rows), seen


def _one(
    operation: Operation, place: str, tensors: dict[int, Any], after: list[tf.Tensor], seen: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[Any]]:
    """The stamps of one operation, which waits for `after`, and its outputs."""
    with tf.control_dependencies(after):
        here = {t: copied(tensors[t]) for t in operation.takes}
    begun = _stamp(list(here.values()), place, after, seen)
    sources = [t for t in here.values() if t.dtype.is_floating]
    with tf.control_dependencies([begun]), tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = private.call_node(operation.node, here, training=True)
    turned = _stamp(outputs, place, [begun], seen)
    targets = [t for t in outputs if t.dtype.is_floating]
    sources = sources + [v.value for v in operation.variables if v.trainable]
    if not (targets and sources):
        return [begun, turned, turned], outputs
    with tf.control_dependencies([turned]):
        gradients = tape.gradient(targets, sources)
    return [begun, turned, _stamp(gradients, place, [turned], seen)], outputs


def _stamp(tensors: Sequence[Any], place: str, after: Sequence[tf.Tensor], seen: list[tf.Tensor]) -> tf.Tensor:
    """The clock when tensors are there.

    An element of each comes to the host, since a device computes on while that goes ahead; they are added to `seen`.
    """
    firsts = [tf.reshape(t, [-1])[:1] for t in tf.nest.flatten(list(tensors), expand_composites=True) if t is not None]
    with tf.device(_host(place)):
        arrived = [tf.identity(first) for first in firsts]
        seen += arrived
        with tf.control_dependencies([*arrived, *after]):
            return tf.timestamp()


def _host(place: str) -> str:
    """The CPU of a device."""
    spec = tf.DeviceSpec.from_string(place)
    return place if spec.device_type == "CPU" else spec.replace(device_type="CPU", device_index=0).to_string()


def _untimed(what: str, batch: int, error: Exception) -> str:
    return (
        f"{what} could not be timed on made-up input of {batch} samples ({error}). A cut by time and a report need "
        'that; balance="parameters" or "memory", numbers of operations and mappings do without.'
    )


def _wait(tensor: tf.Tensor) -> None:
    """A device computes on while Python goes ahead; one element of the result is there when all is."""
    tf.reshape(tensor, [-1])[:1].numpy()


def _made_up(symbol: Any, batch: int) -> tf.Tensor:
    first, *rest = symbol.shape
    shape = [batch if first is None else first, *(UNKNOWN if size is None else size for size in rest)]
    dtype = tf.as_dtype(symbol.dtype)
    return tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)
