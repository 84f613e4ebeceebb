"""A group of threads in one process that behaves like a group of ranks, for tests. Eager only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

T = TypeVar("T")


class _Meeting:
    """Where the threads of one group leave what they bring and take what all brought."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, label: tuple[Any, ...], value: Any) -> list[Any]:
        self.brought[rank] = (label, value)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        labels = {b[0] for b in brought}
        if len(labels) != 1:
            raise RuntimeError(f"ranks met in different collectives: {sorted(map(str, labels))}")
        return [b[1] for b in brought]


class Threaded:
    """One rank of a group of threads. Make groups with `Threaded.run`.

    Follows `tfdist.comm.collective.Collective`; results are computed with numpy in rank order.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._meeting = meeting
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(meeting.brought)
        self.hosts = tuple(f"host{r}" for r in range(self.size))

    @staticmethod
    def run(size: int, fn: Callable[[Threaded], T], timeout: float = 20.0) -> list[T]:
        """Calls `fn(collective)` in `size` threads; their results by rank.

        Raises:
          the first rank's exception; BrokenBarrierError where a rank never came, after `timeout` seconds.
        """
        meeting = _Meeting(size, timeout)
        results: list[Any] = [None] * size
        errors: list[BaseException | None] = [None] * size

        def work(rank: int) -> None:
            try:
                results[rank] = fn(Threaded(rank, meeting))
            except BaseException as error:  # raised again in the caller's thread
                errors[rank] = error
                meeting.barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [e for e in errors if e is not None]
        own = [e for e in raised if not isinstance(e, threading.BrokenBarrierError)]
        if raised:
            raise (own or raised)[0]
        return results

    def all_reduce(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        label = ("all_reduce", name, op, tensor.dtype.name, tuple(tensor.shape))
        stack = np.stack(self._meeting.exchange(self.rank, label, tensor.numpy()))
        known = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}
        if op not in known:
            raise ValueError(f"unknown reduction {op!r}; known are {', '.join(map(repr, known))}")
        return tf.constant(known[op](stack, axis=0).astype(stack.dtype))

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        label = ("all_gather", name, tensor.dtype.name, tuple(tensor.shape)[1:])
        parts = self._meeting.exchange(self.rank, label, tensor.numpy())
        return tf.constant(np.concatenate(parts), dtype=tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        label = ("broadcast", name, root, tensor.dtype.name, tuple(tensor.shape))
        return tf.constant(self._meeting.exchange(self.rank, label, tensor.numpy())[root])

    def reduce_scatter(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        whole = self.all_reduce(tensor, name, op)
        return tf.constant(np.array_split(whole.numpy(), self.size)[self.rank])

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, threading.BrokenBarrierError)
