"""The life of a task that is not the first: serve, notice when the first is done or gone, leave.

It looks at the first task's queues (`board`) every half second; that it has seen the end it acknowledges there, for
which the first waits before it leaves.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import NoReturn

import tensorflow as tf

from tfdist.tasks import keepalive, memory
from tfdist.tasks.board import Board, kept, listens
from tfdist.tf_config import Cluster, Task, check_job, from_env

LOOK = 0.5  # seconds between two looks at the first task
LOST = 10.0  # seconds without an answer of a first task that answered before, after which it counts as gone
NEVER_CAME = 600.0  # seconds to wait for the first task to answer the first time
THREADS = 4  # of a task that run operations, at least
FAILED, GONE = 1, 3  # exit codes of a task whose first one failed, or vanished


def serve() -> NoReturn:
    """Serves as the task that TF_CONFIG names until the first one, the chief or worker/0 without one, is done.

    Raises:
      SystemExit: 0 when the first task is done, another code when it failed or vanished.
      ValueError: TF_CONFIG is missing or wrong, or names this process the first task or the evaluator.
    """
    found = from_env()
    if found is None:
        raise ValueError(
            "serve() needs TF_CONFIG, which names the tasks and this process's place among them; it is not set. Start "
            "the script with `tfdist run --ps 1 --workers 2`, or see docs/parameter-server.md for its form."
        )
    cluster, task = found
    check_job(cluster)
    if task == cluster.first:
        name = "the chief" if task.is_chief else f"{task.name}, which runs the program where there is no chief"
        raise ValueError(f"serve() is for worker and ps tasks, and TF_CONFIG names this process {name}.")
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
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()), job_name=task.job, task_index=task.index, config=_config()
    )
    kept.append(server)
    print(f"serving as {task.name}", flush=True)
    code = watch(Board(cluster), task)
    atexit.register(leave, code)
    return code


def _config() -> tf.compat.v1.ConfigProto:
    """What a script has said by `tf.config` of threads and of the GPUs' memory, which a server does not ask for."""
    asked = tf.config.threading
    gpus = tf.config.list_physical_devices("GPU")
    grow = bool(gpus) and all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
    return tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=asked.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(enough_threads(), asked.get_inter_op_parallelism_threads()),
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=grow),
    )


def enough_threads() -> int:
    """Of a process that run operations.

    TensorFlow makes as many as it sees cores. With one, a step waits for itself: it holds the thread that the part of
    it that comes back from another task would need.
    """
    return max(THREADS, len(os.sched_getaffinity(0)))


def leave(code: int) -> None:
    """Ends the process here: to take TensorFlow's server and sessions down would wait for tasks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Silence:
    """How long the first task, `whom` in messages, has given the task `name` no answer."""

    def __init__(self, name: str, whom: str) -> None:
        self._name, self._whom, self._began = name, whom, time.monotonic()
        self._heard: float | None = None

    def broken(self) -> None:
        """It has answered."""
        self._heard = time.monotonic()

    def too_long(self, error: tf.errors.OpError) -> bool:
        """It has not; whether it counts as gone, which is printed then."""
        silent = time.monotonic() - (self._began if self._heard is None else self._heard)
        if silent <= (NEVER_CAME if self._heard is None else LOST):
            return False
        print(f"{self._name}: {self._whom} gave no answer for {silent:.0f} s ({error.message})", file=sys.stderr)
        return True


def watch(board: Board, task: Task) -> int:
    """Returns when the first task says that the job is over, or has gone; the exit code."""
    silence = Silence(task.name, board.whom)
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
    """Until the first task has left: while it takes its state down TensorFlow calls the tasks and complains of each."""
    ends = time.monotonic() + seconds
    while listens(board.address) and time.monotonic() < ends:
        time.sleep(0.1)
