"""The first task of a cluster of workers: its TensorFlow sees the devices of all tasks as its own."""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfdist.tasks import keepalive, memory
from tfdist.tasks.board import Board, dismiss
from tfdist.tasks.serving import GONE, enough_threads, leave
from tfdist.tasks.waiting import await_tasks, named, servers, silent
from tfdist.tf_config import Cluster, Task

LOOK = 5.0  # seconds between two looks whether all tasks are there
STUCK = 30.0  # seconds without one of them, after which this process ends if TensorFlow has not noticed
BEFORE = "/job:localhost/"  # what TensorFlow calls this process until it joins a cluster
REMOTE = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")


class First:
    """Connected to all other tasks of `cluster`, which it dismisses when Python ends.

    Raises:
      RuntimeError: tasks did not come up in `start` seconds, or this process belongs to another cluster already.
    """

    _connected: First | None = None

    def __init__(self, cluster: Cluster, start: float) -> None:
        if First._connected is not None:
            raise RuntimeError(
                "This process is connected to the tasks of another TF_CONFIG, and TensorFlow joins one cluster only. "
                "Use a process for each."
            )
        self.cluster, self._others = cluster, servers(cluster)
        await_tasks(cluster, start)
        memory.keep()
        keepalive.start(cluster)
        with contextlib.suppress(RuntimeError):  # TensorFlow has started: then with the threads it has
            if not tf.config.threading.get_inter_op_parallelism_threads():
                tf.config.threading.set_inter_op_parallelism_threads(enough_threads())
        # It starts this process' own server too. (For a resolver, it would make a device the default one.)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(cluster.spec()), job_name=cluster.first.job, task_index=cluster.first.index
        )
        self._board = Board(cluster)
        First._connected = self
        atexit.register(self._leave)

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Surrounds what needs the other tasks.

        Where TensorFlow does not return although one of them has been gone for `STUCK` seconds, this process ends.

        Raises:
          RuntimeError: one of them has ended, which is named; or something is of a time before the cluster.
        """
        over = threading.Event()
        threading.Thread(target=self._guard, args=(what, over), name="tfdist-guard", daemon=True).start()
        try:
            yield
        except tf.errors.OpError as error:
            if BEFORE in error.message:
                raise RuntimeError(
                    f"{what} met what was made before this process joined the cluster of TF_CONFIG, which gave all "
                    "devices new names. Make the strategy first, ahead of data and models."
                ) from error
            gone = silent(self.cluster, self._others) or self._blamed(error)
            if not gone:
                raise
            raise RuntimeError(self._lost(gone, what)) from error
        finally:
            over.set()

    def _lost(self, gone: list[Task], what: str) -> str:
        return (
            f"{named(self.cluster, gone)} ended during {what}, and the layers, weights and slots on its devices with "
            "it. See in its output why, and start the job again from its last checkpoint."
        )

    def _guard(self, what: str, over: threading.Event) -> None:
        heard = time.monotonic()
        while not over.wait(LOOK):
            gone = silent(self.cluster, self._others)
            if not gone:
                heard = time.monotonic()
            elif time.monotonic() - heard > STUCK and not over.is_set():
                print(f"tfdist: {self._lost(gone, what)} Ending, as {what} goes on.", file=sys.stderr)
                leave(GONE)

    def _blamed(self, error: tf.errors.OpError) -> list[Task]:
        """Those that could not be reached by what the error says: whoever was started again listens."""
        if not isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
            return []
        told = {(job, int(index)) for job, index in REMOTE.findall(error.message)}
        return [task for task in self._others if (task.job, task.index) in told]

    def _leave(self) -> None:
        failed = getattr(sys, "last_value", None) is not None
        dismiss(self._board, len(self._others) - len(silent(self.cluster, self._others)), failed)


def connected(cluster: Cluster, start: float) -> First:
    """This process as the first task of `cluster`; the same one each time."""
    there = First._connected
    return there if there is not None and there.cluster == cluster else First(cluster, start)
