"""Has the kernel try the connections between tasks, so that a host which vanishes is noticed.

A process that dies closes its connections, which the other side sees at once. A host that loses its power or its
network says nothing: TensorFlow's calls to it would wait for the kernel's own patience, some 15 minutes while data are
under way, and for ever on an idle connection. gRPC's keepalive is off in TensorFlow and cannot be switched on from
outside, but the kernel has one of its own for each connection (RFC 1122, 4.2.3.6; RFC 5482 for what is under way).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import threading
import time
from collections.abc import Iterable

from tfdist.tf_config import Cluster, host_and_port

IDLE, BETWEEN, TRIES = 10, 5, 4  # seconds, seconds, and how many: gone after 30 s without an answer
UNDER_WAY = 30_000  # milliseconds in which what was sent has to be acknowledged
LOOK = 2.0  # seconds between two looks for new connections

Address = tuple[str, int]


def start(cluster: Cluster) -> None:
    """Looks after this process's connections with the cluster's tasks, from a thread, to the end of the process."""
    if not hasattr(socket, "TCP_USER_TIMEOUT") or not os.path.isdir("/proc/self/fd"):  # not Linux
        return
    known = _resolved(address for addresses in cluster.spec().values() for address in addresses)

    def look() -> None:
        done: set[int] = set()
        while True:
            done = keep(known, done)
            time.sleep(LOOK)

    threading.Thread(target=look, name="tfdist-keepalive", daemon=True).start()


def keep(known: set[Address], done: set[int]) -> set[int]:
    """Sets the options of all connections with one end among `known` but those `done`; the inodes of all of them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            found.add(status.st_ino)
            if status.st_ino not in done:
                # A copy, so that closing it here leaves gRPC's own open.
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    _try_often(connection, known)
    return found


def _try_often(connection: socket.socket, known: set[Address]) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return
    ends = {_plain(connection.getpeername()), _plain(connection.getsockname())}
    if ends & known:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, IDLE),
            (socket.TCP_KEEPINTVL, BETWEEN),
            (socket.TCP_KEEPCNT, TRIES),
            (socket.TCP_USER_TIMEOUT, UNDER_WAY),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _plain(end: tuple) -> Address:
    """Host and port, an IPv4 address in IPv6 clothes as what it is."""
    host = ipaddress.ip_address(end[0].partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return str(mapped or host), int(end[1])


def _resolved(addresses: Iterable[str]) -> set[Address]:
    found: set[Address] = set()
    for address in addresses:
        with contextlib.suppress(OSError):
            for *_, end in socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_STREAM):
                found.add(_plain(end))
    return found
