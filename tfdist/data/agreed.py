"""Ranks that bring batches of their own: they agree, one batch ahead, who still has one and how large it is.

The ranks' data may end at different times. A rank that ran out goes on with ghosts (its last batch,
weight 0) until nobody has any data left, so no reduction waits for it and no sample counts twice::

    rank 0   b b b b b b .        step 5: rank 0 brings 64 samples of 64
    rank 1   b b b b g .          (rank 1 is a ghost), step 6: nobody: end

The agreement for batch k+1 is asked for when batch k is handed out, in a thread, so it travels while
step k computes. Every rank hands out the same number of batches, hence the requests always pair up.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.comm import watch
from tfdist.comm.collective import Collective
from tfdist.data.share import Share, rows


class AgreedDataset:
    """What Keras iterates in place of a `tf.data.Dataset` when the ranks' data may differ in length.

    Args:
        dataset: this rank's batches, or its `Share`s.
        together: whether these are parts of the same global batches, so that all ranks must have equally many.
        instead: called, on every rank, where `dataset` should share files and some rank got none; returns the
            dataset to use from then on, or raises.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        comm: Collective,
        together: bool = False,
        instead: Callable[[], tf.data.Dataset] | None = None,
    ) -> None:
        self.dataset = dataset
        self.together = together
        self.comm = comm
        self.instead = instead
        spec = dataset.element_spec
        scalar = tf.TensorSpec((), tf.int32)
        data = spec.data if isinstance(spec, Share) else spec
        label = spec.label if together and isinstance(spec, Share) else ()
        self.element_spec = Share(data, scalar, scalar, tf.TensorSpec((), tf.bool), label)

    def cardinality(self) -> tf.Tensor:
        return tf.constant(tf.data.UNKNOWN_CARDINALITY, tf.int64)

    def __iter__(self) -> Iterator[Share]:
        return _AgreedIterator(self)


class _AgreedIterator:
    """Hands out shares; a daemon thread fetches and agrees on the one after."""

    _made = itertools.count()  # the same on every rank: all of them iterate in the same order

    def __init__(self, dataset: AgreedDataset) -> None:
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = False
        self._started = False
        agreement = _Agreement(dataset, next(self._made))
        self._thread = threading.Thread(
            target=_serve, args=(agreement, self._wanted, self._ready), daemon=True, name="tfdist-agreed"
        )

    def __del__(self) -> None:
        self._wanted.put(False)

    def __iter__(self) -> _AgreedIterator:
        return self

    def __next__(self) -> Share:
        if not self._started:
            # Not before: Keras makes iterators that it never reads, and a generator has one start only.
            self._started = True
            self._thread.start()
            self._wanted.put(True)
        if not self._ended:
            with watch.waiting("the next batch of the ranks' own data"):
                share = self._ready.get()
            if isinstance(share, BaseException):
                self._ended = True
                raise share
            if share is not None:
                self._wanted.put(True)
                return share
            self._ended = True
        raise tf.errors.OutOfRangeError(None, None, "end of the ranks' data")


SLOTS = 8  # iterators whose last, abandoned exchange may still be on its way


@functools.cache
def _adder(comm: Collective, slot: int) -> Any:
    """A summation of which nothing is traced in the thread that uses it."""
    spec = tf.TensorSpec([4], tf.int64)
    return tf.function(lambda brings: comm.all_reduce(brings, f"data/agreed/{slot}", "sum"), input_signature=[spec])


def _serve(agreement: _Agreement, wanted: queue.SimpleQueue, ready: queue.SimpleQueue) -> None:
    while wanted.get():
        try:
            ready.put(agreement.next())
        except BaseException as error:  # handed to the thread that trains
            ready.put(error)


class _Agreement:
    """One rank's source of batches, and the exchange about each."""

    def __init__(self, agreed: AgreedDataset, number: int) -> None:
        self._agreed = agreed
        self._source: Iterator[Any] | None = None
        self._comm = agreed.comm
        self._last: Any = None
        self._label: Any = ()
        self._sum = _adder(agreed.comm, number % SLOTS)

    def next(self) -> Share | None:
        """The next batch, once every rank has said what it brings; None when nobody brings one.

        Raises:
            ValueError: a rank that never brought a batch, so that it could not stand in either.
        """
        if self._source is None:
            self._source = iter(self._agreed.dataset)
        batch, without_file = self._fetch()
        count = 0
        if batch is not None:
            count = int(batch.count) if isinstance(batch, Share) else int(rows(batch))
            self._last = batch.data if isinstance(batch, Share) else batch
            self._label = batch.label if self._agreed.together and isinstance(batch, Share) else ()
        brings = tf.constant([batch is not None, self._last is not None, count, without_file], tf.int64)
        having, started, total, without = (int(n) for n in self._sum(brings).numpy())
        if without and self._agreed.instead is not None:
            self._agreed.dataset, self._agreed.instead = self._agreed.instead(), None
            self._source, self._last = None, None
            return self.next()
        if having == 0:
            return None
        if self._agreed.together and having < self._comm.size:
            raise ValueError(
                f"The input of {self._comm.size - having} of {self._comm.size} ranks ended before that of the others "
                f"(rank {self._comm.rank}: {'goes on' if batch is not None else 'ended'}), but every rank must produce "
                "the same global batches, from which its share is cut. If each rank brings its own batches, make them "
                "a tf.data.Dataset with `options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF`."
            )
        if started < self._comm.size:
            raise ValueError(
                f"{self._comm.size - started} of {self._comm.size} ranks brought no batch at all (rank "
                f"{self._comm.rank} brought {'some' if self._last is not None else 'none'}). Every rank needs at "
                "least one batch of its own to take part in the steps of the others."
            )
        sizes = tf.constant(count, tf.int32), tf.constant(total, tf.int32)
        return Share(self._last, *sizes, tf.constant(count == 0), self._label)

    def _fetch(self) -> tuple[Any, bool]:
        """(this rank's next batch or None, whether it got no file of those that are shared)."""
        try:
            return next(self._source, None), False  # type: ignore[call-overload]
        except tf.errors.InvalidArgumentError as error:
            # TensorFlow counts the files when it opens the first, not when the pipeline is built.
            if self._agreed.instead is None or "Could not apply FILE based sharding" not in str(error):
                raise
            return None, True
