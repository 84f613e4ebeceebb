"""Arrays in memory or on disk: one global order, each rank reading only its own rows.

The order comes from Keras' own array adapter, run over the row numbers instead of the rows, so a seed
gives the order that plain Keras gives it, on any number of ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.data.share import Share, with_ghost
from tfdist.data.shares import bounds, check_batch, has_ghosts


class Arrays(NamedTuple):
    """A rank's pipeline over arrays: `dataset` of `Share`, `samples` in all, the global `batch`."""

    dataset: tf.data.Dataset
    samples: int
    batch: int


def shares(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    rank: int,
    size: int,
    steps: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
) -> Arrays:
    """This rank's shares of arrays, batch by batch, reshuffled every time the dataset is iterated.

    Args:
        batch_size: samples per update over all ranks; None means 32, as in Keras.

    Raises:
        ValueError: lengths that differ, or a batch smaller than the number of ranks.
    """
    adapter = private.array_adapter(
        x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps=steps, class_weight=class_weight
    )
    inputs, samples, batch = private.adapter_parts(adapter)
    check_batch(batch, size)
    order = private.array_adapter(x=np.arange(samples), batch_size=batch, shuffle=shuffle).get_tf_dataset()
    take = _reader(inputs)
    ghosts = has_ghosts(samples, batch, size)

    @tf.autograph.experimental.do_not_convert
    def share(indices: Any) -> Share:
        indices = indices[0] if isinstance(indices, (tuple, list)) else indices
        total = tf.size(indices)
        low, high = bounds(total, rank, size)
        if not ghosts:
            return Share(take(indices[low:high]), high - low, total)
        start, stop = with_ghost(low, high, total)
        return Share(take(indices[start:stop]), high - low, total, tf.equal(low, high))

    dataset = order.map(share, num_parallel_calls=2)
    length = math.ceil(samples / batch)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(length)).prefetch(2)
    return Arrays(quiet(dataset), samples, batch)


def quiet(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches off the rewriting and autotuning of a pipeline.

    Tearing down an autotuned iterator waits for a thread that sleeps 10, 20, 40, ... ms, so an epoch of
    50 ms can take seconds to return; there is nothing to tune in these pipelines.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _reader(inputs: Any):
    """A function from row numbers to rows; files mapped into memory are read row by row."""
    if any(on_disk(a) for a in keras.tree.flatten(inputs)):
        return _disk_reader(inputs)
    held = keras.tree.lists_to_tuples(private.tensors_of(inputs))
    held = keras.tree.map_structure(lambda a: a if a is None or _composite(a) else tf.convert_to_tensor(a), held)

    def take(indices: tf.Tensor) -> Any:
        def one(a: Any) -> Any:
            if private.is_sparse_rows(a):
                return private.sparse_rows(a, indices)
            return tf.gather(a, indices, axis=0)

        return keras.tree.traverse(lambda a: one(a) if _leaf(a) else None, held)

    return take


def _composite(a: Any) -> bool:
    return private.is_sparse_rows(a) or isinstance(a, (tf.RaggedTensor, tf.SparseTensor))


def _leaf(a: Any) -> bool:
    return private.is_sparse_rows(a) or tf.is_tensor(a) or isinstance(a, (tf.RaggedTensor, np.ndarray))


def on_disk(a: Any) -> bool:
    """Whether an array is a file that can be read by rows: `np.memmap`, or a dataset of h5py or zarr."""
    return isinstance(a, np.memmap) or type(a).__module__.split(".")[0] in ("h5py", "zarr")


def _disk_reader(inputs: Any):
    """Rows through numpy, so that only this rank's rows leave the disk."""
    inputs = keras.tree.lists_to_tuples(inputs)
    flat = [a if on_disk(a) else np.asanyarray(a) for a in keras.tree.flatten(inputs)]
    kinds = [keras.config.floatx() if np.dtype(a.dtype).kind == "f" else np.dtype(a.dtype).name for a in flat]

    def read(indices: np.ndarray) -> list[np.ndarray]:
        # Ascending and each once, as HDF5 wants them (and disks like them).
        wanted, back = np.unique(indices, return_inverse=True)
        return [np.asarray(a[wanted], dtype=k)[back] for a, k in zip(flat, kinds, strict=True)]

    def take(indices: tf.Tensor) -> Any:
        out = tf.numpy_function(read, [indices], [tf.as_dtype(k) for k in kinds])
        for tensor, a in zip(out, flat, strict=True):
            tensor.set_shape((None, *a.shape[1:]))
        return keras.tree.pack_sequence_as(inputs, out)

    return take
