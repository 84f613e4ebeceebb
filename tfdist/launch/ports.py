"""Free ports of this machine for the tasks of a job."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from tfdist.new_cluster import cluster_of, task_names
from tfdist.tf_config import Cluster

HOST = "127.0.0.1"


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports of an address of this machine that nobody uses now."""
    with ExitStack() as stack:
        # All stay open until the last is chosen, or the kernel might give one port twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    # A small race remains: TensorFlow's servers open their ports by number, some seconds later,
    # and until then the kernel may give one of them to any other process, for a connection too.


def free_addresses(count: int) -> list[str]:
    """`count` different addresses, "127.0.0.1:port", that nobody uses now."""
    return [f"{HOST}:{port}" for port in free_ports(HOST, count)]


def cluster_on_free_ports(ps: int, workers: int, evaluator: bool = False) -> Cluster:
    """One chief, `ps` parameter servers, `workers` workers, and an evaluator, on this machine.

    Without parameter servers it has workers alone.
    """
    # At the evaluator's nobody listens: it is a task's name, by which the chief knows that there is one.
    names = task_names(ps, workers, evaluator and ps > 0)
    return cluster_of(names, free_addresses(len(names)))
