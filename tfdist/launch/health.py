"""Whether this container's task can be reached: what docker/Dockerfile's HEALTHCHECK runs.

The tasks of TF_CONFIG that serve answer at their own port. Who serves nobody is healthy while the first task, without
which it has nothing to do, can be reached from here. Without TF_CONFIG there is nobody to ask.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from tfdist.tf_config import Cluster, Task, from_env, host_and_port

SECONDS = 5.0


def address(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Host and port that have to answer, None if there is none; ValueError if TF_CONFIG is wrong."""
    found = from_env(env)
    if found is None:
        return None
    cluster, task = found
    return host_and_port(cluster.address(task if _serves(cluster, task) else cluster.first))


def _serves(cluster: Cluster, task: Task) -> bool:
    """Whether the task has a port open all the time, with TensorFlow's server or Horovod's rendezvous behind it."""
    return task == cluster.first or (bool(cluster.ps) and task.job in ("worker", "ps"))


def main() -> int:
    """The exit code: 0 for healthy."""
    where = address(os.environ)
    if where is None:
        return 0
    try:
        socket.create_connection(where, SECONDS).close()
    except OSError as error:
        print(f"{where[0]}:{where[1]} does not answer: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
