"""What the rest of tfdist may ask of a group of processes, and which group this process is in.

A rank calls a collective when every other rank calls the same one, with the same name, element type and
(where stated) shape. Names are always given: ranks that built different numbers of objects would otherwise
pair different tensors.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol, runtime_checkable

import tensorflow as tf

from tfdist import meeting
from tfdist.cluster import World
from tfdist.comm.threaded import Threaded

__all__ = ["OPS", "Alone", "Collective", "Threaded", "check_op", "get", "place", "stay_alone"]

OPS = ("sum", "mean", "min", "max", "product", "adasum")


def check_op(op: str, allowed: tuple[str, ...] = OPS) -> str:
    """Returns `op`, or raises ValueError naming the known reductions."""
    if op not in allowed:
        raise ValueError(f"unknown reduction {op!r}; known are {', '.join(map(repr, allowed))}")
    return op


@runtime_checkable
class Collective(Protocol):
    """`size` processes that reduce, gather and broadcast tensors together.

    Every method works eagerly and inside a `tf.function`, returns a tensor of the input's element type on
    the CPU (sums by NCCL: on the GPU), and raises ValueError for an element type that cannot travel (strings).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]  # by rank

    def all_reduce(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        """The elementwise reduction over ranks, shape as given (the same on every rank).

        `op` is one of `OPS`. "sum" and "mean" are differentiable. "mean" of integers is a ValueError.
        """
        ...

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates along axis 0 in rank order; the first dimensions may differ, the others may not.

        Differentiable: each rank gets the sum over ranks of the gradient of its own rows.
        """
        ...

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        """The tensor of rank `root`; shapes and types must be the same everywhere."""
        ...

    def reduce_scatter(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        """Reduces over ranks and returns this rank's rows of the result.

        Axis 0 is split as evenly as it goes; the first ranks get the longer parts.
        """
        ...

    def abort(self) -> None:
        """Makes every collective that is waiting now, and every later one, end with an error."""
        ...

    def lost(self, error: BaseException) -> bool:
        """Whether `error` says that a collective broke off because a rank left or aborted."""
        ...


class Alone:
    """The group of one process: every collective returns its input. Needs no Horovod."""

    rank, size, local_rank, local_size = 0, 1, 0, 1

    def __init__(self) -> None:
        self.hosts = (socket.gethostname(),)

    def all_reduce(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        check_op(op)
        return tf.convert_to_tensor(tensor)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.convert_to_tensor(tensor)

    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        if root != 0:
            raise ValueError(f"broadcast {name!r}: root is {root}, but there is only rank 0")
        return tf.convert_to_tensor(tensor)

    def reduce_scatter(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        check_op(op)
        return tf.convert_to_tensor(tensor)

    def abort(self) -> None:
        """Nothing ever waits."""

    def lost(self, error: BaseException) -> bool:
        return False


_lock = threading.Lock()
_group: Collective | None = None


def place() -> World:
    """Where this process stands among the ranks; it first meets the others where no Horovod launcher has seen to that.

    Raises:
      SystemExit: 0, in an evaluator's task of TF_CONFIG: the ranks validate.
      RuntimeError: the ranks did not meet.
      ValueError: the environment's variables contradict each other.
    """
    if _group is None and meeting.watches():
        print("tfdist: an evaluator has no part in a ring, whose ranks validate together; it ends.", flush=True)
        raise SystemExit(0)
    if _group is None and (asked := meeting.from_env()) is not None:
        from tfdist.comm import rendezvous

        rendezvous.join(asked)
    return World.from_env()


def stay_alone() -> None:
    """This process is no rank, though TF_CONFIG names several workers: they serve another strategy."""
    global _group
    with _lock:
        if _group is None:
            _group = Alone()


def get() -> Collective:
    """The group of this process, joined at the first call (every rank must make it).

    `Alone` when the launcher started one process, else Horovod's.

    Raises:
      RuntimeError: Horovod is missing or could not connect; says what to do.
    """
    global _group
    with _lock:
        if _group is None:
            world = place()
            if world.size == 1:
                _group = Alone()
            else:
                from tfdist.comm import horovod, watch

                group = horovod.connect(world)
                watch.start(group)
                _group = group
        return _group
