"""Which connections the kernel is asked to try."""

from __future__ import annotations

import socket

import pytest

from tfdist.tasks import keepalive

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not Linux")


def pair(family=socket.AF_INET, host="127.0.0.1"):
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    return listener, client, server


def tried(connection):
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_both_ends_of_a_connection_with_a_task_are_tried_and_no_other():
    mine, others = pair(), pair()
    port = mine[0].getsockname()[1]
    known = keepalive._resolved([f"localhost:{port}", "[::1]:1", f"127.0.0.1:{port}"])
    assert ("127.0.0.1", port) in known
    done = keepalive.keep(known, set())
    assert [tried(c) for c in (*mine[1:], *others[1:])] == [True, True, False, False]
    for connection in mine[1:]:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == keepalive.UNDER_WAY
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == keepalive.IDLE
    # What was looked at is left alone, and what is new is found.
    mine[1].setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    later = socket.create_connection(("127.0.0.1", port))
    keepalive.keep(known, done)
    assert (tried(mine[1]), tried(later)) == (False, True)
    for connection in (*mine, *others, later):
        connection.close()


def test_ipv4_in_ipv6_is_ipv4():
    assert keepalive._plain(("::ffff:198.18.0.1", 7, 0, 0)) == ("198.18.0.1", 7)
    assert keepalive._plain(("fe80::1%eth0", 7, 0, 0)) == ("fe80::1", 7)
    assert keepalive._plain(("198.18.0.1", 7)) == ("198.18.0.1", 7)
