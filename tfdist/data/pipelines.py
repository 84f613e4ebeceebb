"""Datasets shared among ranks: by rows of each global batch, by file, or as the ranks bring them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.comm.collective import Collective
from tfdist.data.agreed import AgreedDataset
from tfdist.data.share import cut, cut_rows, rows
from tfdist.data.shares import bounds, check_batch, describe

Policy = tf.data.experimental.AutoShardPolicy


class Plan(NamedTuple):
    """How a dataset is shared: this rank's, the sentence that says so, and whether shares are of one batch."""

    dataset: Any
    sentence: str
    together: bool
    batch: int | None  # samples of a global batch


def policy_of(dataset: tf.data.Dataset) -> Policy:
    """The `auto_shard_policy` that the user set on a dataset; AUTO when none."""
    return Policy(dataset.options().experimental_distribute.auto_shard_policy)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Rows of a full batch of a dataset, where that can be told without reading it."""
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))
    if size > 0:
        return size
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank and shape[0]:
            return int(shape[0])
    return None


def share(dataset: tf.data.Dataset, comm: Collective, *, label: bool = False, by_file: bool = True) -> Plan:
    """Turns a dataset of global batches into this rank's dataset of `Share`.

    Args:
        label: fingerprint each global batch, so that ranks notice that they see different ones.
        by_file: whether files may be shared instead of batches (the order of samples is then another).

    Raises:
        ValueError: a global batch that is smaller than the number of ranks; ranks whose finite datasets
            have different lengths although they should be copies of each other.
    """
    policy = policy_of(dataset)
    if policy == Policy.OFF:
        sentence = "auto_shard_policy OFF: the ranks' own batches, neither cut nor rebatched"
        return Plan(AgreedDataset(dataset, comm), sentence, False, None)
    size = batch_size(dataset)
    if size is not None:
        check_batch(size, comm.size, "the dataset's batch")
    length = int(dataset.cardinality())
    # Files do not tell how many samples they hold; where the length is known, the data are in memory.
    if by_file and (policy == Policy.FILE or (policy == Policy.AUTO and length == tf.data.UNKNOWN_CARDINALITY)):
        mine = shard_files(dataset, comm.rank, comm.size, size)
        everywhere = bool(comm.all_reduce(tf.constant(mine is not None, tf.int32), "data/files", "min"))
        if everywhere and mine is not None:

            def cut_instead() -> tf.data.Dataset:
                if policy == Policy.FILE:
                    raise ValueError(_no_files(comm.size))
                if comm.rank == 0:
                    print(f"tfdist: fewer files than ranks: {_cut_sentence(size, comm.size)}", flush=True)
                return _cut(dataset, comm, label=False).prefetch(2)

            sentence = f"files shared among {comm.size} ranks"
            return Plan(AgreedDataset(mine, comm, instead=cut_instead), sentence, False, size)
        if policy == Policy.FILE:
            raise ValueError(_no_files(comm.size))
    mine = _cut(dataset, comm, label)
    if length == tf.data.UNKNOWN_CARDINALITY:
        return Plan(AgreedDataset(mine.prefetch(2), comm, together=True), _cut_sentence(size, comm.size), True, size)
    longest = int(comm.all_reduce(tf.constant(length, tf.int64), "data/longest", "max"))
    shortest = int(comm.all_reduce(tf.constant(length, tf.int64), "data/shortest", "min"))
    if longest != shortest:
        raise ValueError(
            f"The ranks' datasets have {shortest} to {longest} batches (rank {comm.rank}: {length}), but every rank "
            "must build the same dataset of global batches, from which its share is cut. If each rank brings its "
            "own batches, set `options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF`."
        )
    return Plan(mine.prefetch(2), _cut_sentence(size, comm.size), True, size)


def _cut(dataset: tf.data.Dataset, comm: Collective, label: bool) -> tf.data.Dataset:
    """This rank's `Share` of each global batch."""

    @tf.autograph.experimental.do_not_convert
    def part(*batch: Any) -> Any:
        return cut(_packed(batch), comm.rank, comm.size, label)

    return dataset.map(part, num_parallel_calls=2)


def _no_files(size: int) -> str:
    return (
        f"auto_shard_policy FILE was set, but the dataset's files could not be shared among {size} ranks: it needs "
        "at least as many files as ranks, read by a tf.data reader, and a batch size that can be told from the "
        "pipeline. Use DATA, or bring more files."
    )


def _cut_sentence(batch: int | None, size: int) -> str:
    return describe(batch, size) if batch is not None else f"each global batch cut among {size} ranks"


def _packed(batch: tuple) -> Any:
    return batch if len(batch) > 1 else batch[0]


def plain_share(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """This rank's rows of each global batch, for custom loops: same structure as the dataset's."""
    if policy_of(dataset) == Policy.OFF or size == 1:
        return dataset

    @tf.autograph.experimental.do_not_convert
    def mine(*batch: Any) -> Any:
        data = _packed(batch)
        total = rows(data)
        return cut_rows(data, *bounds(total, rank, size))

    return dataset.map(mine, num_parallel_calls=2).prefetch(2)


def shard_files(dataset: tf.data.Dataset, rank: int, size: int, batch: int | None) -> tf.data.Dataset | None:
    """The dataset restricted to every `size`-th file, rebatched to the rank's part of a global batch.

    None when the pipeline reads no files, or its batch size cannot be told. Where there are fewer files than ranks,
    the ranks without one get TensorFlow's error at their first batch.
    """
    if batch is None:
        return None
    try:
        with _without_stderr():  # TensorFlow prints the whole graph where it finds no file in it
            variant = tf.raw_ops.AutoShardDataset(
                input_dataset=tf.data.experimental.to_variant(dataset),
                num_workers=size,
                index=rank,
                output_types=_flat(dataset, "dtype"),
                output_shapes=_flat(dataset, "shape"),
                auto_shard_policy=Policy.FILE.value,
                num_replicas=size,
            )
        mine = tf.data.experimental.from_variant(variant, dataset.element_spec)
    except tf.errors.OpError:
        return None
    low, high = bounds(batch, rank, size)
    return mine.rebatch(high - low)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what C++ code writes to the process's stderr meanwhile."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def open_ended(data: Any) -> Any:
    """A dataset that is not cut by batches, without its own length, by which Keras would end an epoch.

    The ranks' own batches, or files, may be more on one rank than on another.
    """
    if not isinstance(data, tf.data.Dataset) or policy_of(data) not in (Policy.OFF, Policy.FILE):
        return data
    return data if int(data.cardinality()) < 0 else data.filter(lambda *_: True)


def _flat(dataset: tf.data.Dataset, what: str) -> list[Any]:
    specs = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    return [getattr(spec, what) for spec in specs]
