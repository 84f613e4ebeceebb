"""The life of a worker or ps task: serve, notice when the chief is done or gone, leave.

The chief's own TensorFlow server keeps two queues: one fills when the job is done, the other when it failed. A task
looks at them every half second; what it has seen it acknowledges in a third, for which the chief waits before it
leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import tensorflow as tf

from tfdist.ps import keepalive, memory
from tfdist.tf_config import Cluster, Task, from_env, host_and_port, need_chief

LOOK = 0.5  # seconds between two looks at the chief
LOST = 10.0  # seconds without an answer of a chief that answered before, after which it counts as gone
NEVER_CAME = 600.0  # seconds to wait for a chief to answer the first time
THREADS = 4  # of a task that run operations, at least
FAILED, GONE = 1, 3  # exit codes of a task whose chief failed, or vanished
CHIEF_DEVICE = "/job:chief/task:0/device:CPU:0"

_kept: list[Any] = []  # servers and sessions, which end with the process


class Board:
    """The chief's queues, as seen from any task."""

    def __init__(self, address: str) -> None:
        v1 = tf.compat.v1
        self._address, self._session = address, None
        self._config = v1.ConfigProto(device_filters=["/job:chief"], operation_timeout_in_ms=5000)
        self._limit = v1.RunOptions(timeout_in_ms=5000)
        self._graph = tf.Graph()
        with self._graph.as_default(), tf.device(CHIEF_DEVICE):
            queues = {
                name: v1.FIFOQueue(1000, [tf.int32], shapes=[()], shared_name=f"tfdist_{name}")
                for name in ("done", "failed", "seen")
            }
            self._put = {name: queue.enqueue(0) for name, queue in queues.items()}
            self._sizes = {name: queue.size() for name, queue in queues.items()}

    def put(self, name: str) -> None:
        self._run(self._put[name])

    def sizes(self) -> dict[str, int]:
        """How full each queue is.

        Raises:
          tf.errors.OpError: the chief gives no answer.
        """
        return self._run(self._sizes)

    def _run(self, what: Any, feed: Mapping[Any, Any] | None = None) -> Any:
        if self._session is None:
            if not listens(self._address):  # a session waits for its server without end
                raise tf.errors.UnavailableError(None, None, f"nobody listens at {self._address}")
            self._session = tf.compat.v1.Session(f"grpc://{self._address}", graph=self._graph, config=self._config)
            _kept.append(self._session)  # to close it would ask the server, which may be gone, and wait
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


def serve() -> NoReturn:
    """Serves as the worker or ps task that TF_CONFIG names until the chief is done.

    Raises:
      SystemExit: 0 when the chief is done, another code when it failed or vanished.
      ValueError: TF_CONFIG is missing or wrong, or names this process the chief or the evaluator.
    """
    found = from_env()
    if found is None:
        raise ValueError(
            "serve() needs TF_CONFIG, which names the tasks and this process's place among them; it is not set. Start "
            "the script with `tfdist run --ps 1 --workers 2`, or see docs/parameter-server.md for its form."
        )
    cluster, task = found
    need_chief(cluster)
    if task.is_chief:
        raise ValueError("serve() is for worker and ps tasks, and TF_CONFIG names this process the chief.")
    if task.job == "evaluator":
        raise ValueError(
            f"serve() is for worker and ps tasks, and TF_CONFIG names this process {task.name}, which needs the model "
            "and the validation data. Run the training script there, as on the chief: its fit() evaluates."
        )
    raise SystemExit(serve_as(cluster, task))


def serve_as(cluster: Cluster, task: Task) -> int:
    """Serves until the job's end; the exit code."""
    memory.keep()
    keepalive.start(cluster)
    # TensorFlow makes as many threads as it sees cores. With one, a step waits for itself: it holds the thread that
    # the part of it that comes back from the ps would need.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=max(THREADS, len(os.sched_getaffinity(0))))
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()), job_name=task.job, task_index=task.index, config=config
    )
    _kept.append(server)
    print(f"serving as {task.name}", flush=True)
    code = watch(Board(cluster.chief), task)
    atexit.register(leave, code)
    return code


def leave(code: int) -> None:
    """Ends the process here: to take TensorFlow's server and sessions down would wait for tasks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Silence:
    """How long the chief has given the task `name` no answer."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()
        self._heard: float | None = None

    def broken(self) -> None:
        """The chief has answered."""
        self._heard = time.monotonic()

    def too_long(self, error: tf.errors.OpError) -> bool:
        """It has not; whether it counts as gone, which is printed then."""
        silent = time.monotonic() - (self._began if self._heard is None else self._heard)
        if silent <= (NEVER_CAME if self._heard is None else LOST):
            return False
        print(f"{self._name}: the chief gave no answer for {silent:.0f} s ({error.message})", file=sys.stderr)
        return True


def watch(board: Board, task: Task) -> int:
    """Returns when the chief says that the job is over, or has gone; the exit code."""
    silence = Silence(task.name)
    while True:
        try:
            sizes = board.sizes()
            silence.broken()
            if sizes["done"] or sizes["failed"]:
                board.put("seen")
                _wait_for_the_end(board)
                return FAILED if sizes["failed"] else 0
        except tf.errors.OpError as error:
            if silence.too_long(error):
                return GONE
        time.sleep(LOOK)


def _wait_for_the_end(board: Board, seconds: float = 8.0) -> None:
    """Until the chief has left: while it takes its own state down TensorFlow calls the tasks, and complains of each."""
    ends = time.monotonic() + seconds
    with contextlib.suppress(tf.errors.OpError):
        while time.monotonic() < ends:
            board.sizes()
            time.sleep(0.1)


def dismiss(board: Board, tasks: int, failed: bool, seconds: float = 10.0) -> None:
    """On the chief: tells the tasks that the job is over, and waits until they know."""
    ends = time.monotonic() + seconds
    try:
        board.put("failed" if failed else "done")
        while board.sizes()["seen"] < tasks and time.monotonic() < ends:
            time.sleep(0.05)
    except tf.errors.OpError as error:
        print(f"tfdist: the tasks could not be told that the job is over: {error.message}", file=sys.stderr)


os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")
