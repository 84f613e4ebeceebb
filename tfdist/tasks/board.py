"""What the first task tells the others: queues on its own TensorFlow server.

One fills when the job is done, another when it failed. What a task has seen it acknowledges in a third.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist.tf_config import Cluster, host_and_port

kept: list[Any] = []  # servers and sessions, which end with the process


class Board:
    """The first task's queues, as seen from any task of the cluster.

    Attributes:
      address: of the first task.
      whom: the first task's name in messages.
    """

    def __init__(self, cluster: Cluster) -> None:
        v1 = tf.compat.v1
        first = cluster.first
        self.whom = "the chief" if first.is_chief else first.name
        self.address, self._session = cluster.address(first), None
        self._device = f"/job:{first.job}/task:{first.index}"
        self._config = v1.ConfigProto(device_filters=[self._device], operation_timeout_in_ms=5000)
        self._limit = v1.RunOptions(timeout_in_ms=5000)
        self._graph = tf.Graph()
        with self.placed():
            queues = {
                name: v1.FIFOQueue(1000, [tf.int32], shapes=[()], shared_name=f"tfdist_{name}")
                for name in ("done", "failed", "seen")
            }
            self._put = {name: queue.enqueue(0) for name, queue in queues.items()}
            self._sizes = {name: queue.size() for name, queue in queues.items()}

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Surrounds the making of what belongs to the queues' graph."""
        with self._graph.as_default(), tf.device(f"{self._device}/device:CPU:0"):
            yield

    def put(self, name: str) -> None:
        self._run(self._put[name])

    def sizes(self) -> dict[str, int]:
        """How full each queue is.

        Raises:
          tf.errors.OpError: the first task gives no answer.
        """
        return self._run(self._sizes)

    def _run(self, what: Any, feed: Mapping[Any, Any] | None = None) -> Any:
        if self._session is None:
            if not listens(self.address):  # a session waits for its server without end
                raise tf.errors.UnavailableError(None, None, f"nobody listens at {self.address}")
            self._session = tf.compat.v1.Session(f"grpc://{self.address}", graph=self._graph, config=self._config)
            kept.append(self._session)  # to close it would ask the server, which may be gone, and wait
        try:
            return self._session.run(what, feed, options=self._limit)
        except tf.errors.OpError:
            self._session = None
            raise


def listens(address: str) -> bool:
    """Whether a connection to "host:port" is accepted."""
    try:
        socket.create_connection(host_and_port(address), timeout=1.0).close()
    except OSError:
        return False
    return True


def dismiss(board: Board, tasks: int, failed: bool, seconds: float = 10.0) -> None:
    """On the first task: tells the others that the job is over, and waits until so many know."""
    ends = time.monotonic() + seconds
    try:
        board.put("failed" if failed else "done")
        while board.sizes()["seen"] < tasks and time.monotonic() < ends:
            time.sleep(0.05)
    except tf.errors.OpError as error:
        print(f"tfdist: the tasks could not be told that the job is over: {error.message}", file=sys.stderr)
