"""Waiting for tasks, and for calls of TensorFlow that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import tensorflow as tf

from tfdist.tasks.board import listens
from tfdist.tf_config import Cluster, Task

TELL = 10.0  # seconds between two lines about tasks that are not there yet


def started(function: Callable[[], Any]) -> Future[Any]:
    """Calls `function` in a thread that the process does not wait for at its end, as it would for a pool's."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """What `function` returns, or raises.

    Raises:
      tf.errors.DeadlineExceededError: it takes longer, and goes on in its thread: TensorFlow's calls cannot be ended.
    """
    future = started(function)
    if not wait([future], timeout=seconds).done:
        raise tf.errors.DeadlineExceededError(None, None, f"no answer within {seconds:.0f} s")
    return future.result()


def await_tasks(cluster: Cluster, seconds: float) -> None:
    """Returns when every task listens; says now and then for which it waits.

    Raises:
      RuntimeError: some do not after `seconds`; it names them.
    """
    missing = servers(cluster)
    ends, told = time.monotonic() + seconds, time.monotonic()
    while missing := silent(cluster, missing):
        now = time.monotonic()
        if now > ends:
            raise RuntimeError(
                f"After {seconds:.0f} s there is no {named(cluster, missing)}. Start the same script with its own "
                "TF_CONFIG for each task, and see that this one reaches these addresses."
            )
        if now - told > TELL:
            told = now
            print(f"tfdist: waiting for {named(cluster, missing)}", flush=True)
        time.sleep(0.1)


def servers(cluster: Cluster) -> list[Task]:
    """The tasks that the first one needs."""
    return [task for task in cluster.tasks() if task.job in ("worker", "ps") and task != cluster.first]


def silent(cluster: Cluster, tasks: list[Task]) -> list[Task]:
    """Those at whose address nobody listens."""
    return [task for task in tasks if not listens(cluster.address(task))]


def named(cluster: Cluster, tasks: list[Task]) -> str:
    """Tasks and their addresses, for a message."""
    return ", ".join(f"{task.name} ({cluster.address(task)})" for task in tasks)
