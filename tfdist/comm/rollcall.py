"""The threads and connections behind `tfdist.comm.watch`: one thread a process, one connection to rank 0.

Messages are lines of JSON. To rank 0: hello (with the token), overdue, state, bye. From rank 0: ask, stop, gone.
Nothing is sent while nobody is overdue.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from typing import Any

from tfdist.comm.verdict import State, judge
from tfdist.comm.watch import Board, Region

RELEASE_SECONDS = 10.0  # from a verdict to the end of a process that nothing releases
ANSWER_SECONDS = 5.0  # for a rank's state
LONGEST_LINE = 100_000  # bytes


class Line:
    """A connection that carries JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._rest = sock, b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(5.0)

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # a broken line is noticed by receive
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that are there; None when the other end closed or is no rank. Call when readable."""
        try:
            data = self.sock.recv(65536)
            *lines, self._rest = (self._rest + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        sane = len(self._rest) < LONGEST_LINE and all(isinstance(m, dict) for m in messages)
        return messages if data and sane else None


class RollCall:
    """One process's end of the roll call.

    Args:
      board: what the main thread writes on.
      lines: rank 0: none yet; other ranks: the connection to rank 0.
      listener: rank 0: where the others come in.
    """

    def __init__(
        self,
        board: Board,
        token: str,
        listener: socket.socket | None = None,
        chief: Line | None = None,
    ) -> None:
        self.board, self._token, self._listener, self._chief = board, token, listener, chief
        self._members: dict[int, Line] = {}
        self._round: dict[int, State | None] | None = None  # answers, while rank 0 asks
        self._round_since, self._reporter, self._limit = 0.0, 0, 0.0
        self._reported = 0.0
        self._releasing = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        if chief is not None:
            self._selector.register(chief.sock, selectors.EVENT_READ, (0, chief))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tfdist-rollcall", daemon=True)
        self._thread.start()

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            tick = min(1.0, self.board.deadline / 10)
            for key, _ in self._selector.select(timeout=tick):
                if self._listener is not None and key.fileobj is self._listener:
                    self._accept(self._listener)
                elif key.data is not None:
                    self._read(*key.data)
            if not self._stopping:
                self._look()

    def _look(self) -> None:
        """Once a tick: is this rank overdue, is the round complete?"""
        now, board = time.monotonic(), self.board
        state = board.state()
        overdue = state.path and not state.busy and state.seconds > board.deadline
        if overdue and now - self._reported > board.deadline / 4:
            self._reported = now
            if self._chief is not None:
                self._chief.send(kind="overdue", deadline=board.deadline)
            else:
                self._ask(board.group.rank, board.deadline)
        if self._round is not None:
            answered = len(self._round) == board.group.size
            if answered or now - self._round_since > ANSWER_SECONDS:
                self._close_round()

    # Rank 0 -----------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            self._selector.register(sock, selectors.EVENT_READ, (None, Line(sock)))

    def _ask(self, reporter: int, deadline: float) -> None:
        if self._round is None and self.board.verdict is None:
            self._round, self._reporter, self._limit = {}, reporter, deadline
            self._round_since = time.monotonic()
            self._round[self.board.group.rank] = self.board.state()
            for line in self._members.values():
                line.send(kind="ask")

    def _close_round(self) -> None:
        answers, self._round = self._round or {}, None
        states = {r: answers.get(r) for r in range(self.board.group.size)}
        message = judge(self._reporter, states, self.board.group.hosts, self._limit)
        if message is not None:
            for line in self._members.values():
                line.send(kind="stop", message=message)
            self._stop(message)

    def _lose(self, rank: int, why: str) -> None:
        for other, line in self._members.items():
            if other != rank:
                line.send(kind="gone", rank=rank, why=why)
        self._mourn(rank, why)

    # Every rank -------------------------------------------------------------------------------

    def _read(self, rank: int | None, line: Line) -> None:
        messages = line.receive()
        for message in messages or []:
            if rank is None:
                rank = self._admit(line, message)
                if rank is None:
                    messages = None
                    break
            else:
                self._handle(rank, message)
        if messages is None:
            self._selector.unregister(line.sock)
            line.sock.close()
            if rank is not None:
                self._members.pop(rank, None)
                if rank not in self.board.gone:
                    self._lose(rank, "")

    def _admit(self, line: Line, message: dict[str, Any]) -> int | None:
        """The rank that said hello with the right token, or None for a stranger."""
        token, rank = str(message.get("token", "")), message.get("rank")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not isinstance(rank, int):
            return None
        self._members[rank] = line
        self._selector.modify(line.sock, selectors.EVENT_READ, (rank, line))
        return rank

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "overdue":
            self._ask(rank, message["deadline"])
        elif kind == "state" and self._round is not None:
            self._round[rank] = State(tuple(message["path"]), message["busy"], message["seconds"])
        elif kind == "bye":
            self._lose(rank, message["why"])
        elif kind == "ask" and self._chief is not None:
            state = self.board.state()
            self._chief.send(kind="state", path=state.path, busy=state.busy, seconds=state.seconds)
        elif kind == "stop":
            self._stop(message["message"])
        elif kind == "gone":
            self._mourn(message["rank"], message["why"])

    def _stop(self, message: str) -> None:
        self.board.tell(verdict=message)
        self._release(patience=0.0)

    def _mourn(self, rank: int, why: str) -> None:
        self.board.tell(gone=(rank, why))
        # Horovod ends what waits for a dead rank by itself. What goes on may be the work after the last
        # collective: leave it alone for long.
        self._release(patience=self.board.deadline)

    def _release(self, patience: float) -> None:
        region = self.board.innermost()
        if region is not None and not self._releasing:
            self._releasing = True
            threading.Thread(target=self._end_wait, args=(region, patience), daemon=True).start()

    def _end_wait(self, region: Region, patience: float) -> None:
        """Makes the main thread leave `region`, in the last resort by ending the process."""
        board = self.board
        with board.news:
            if board.news.wait_for(lambda: not board.inside(region), min(patience, threading.TIMEOUT_MAX)):
                self._releasing = False
                return
        if region.unguarded:
            print(board.verdict or board.farewell(), file=sys.stderr, flush=True)
        threading.Thread(target=board.group.abort, daemon=True).start()
        with board.news:
            left = board.news.wait_for(lambda: not board.inside(region), RELEASE_SECONDS)
        if not left:
            print(board.verdict or board.farewell(), file=sys.stderr, flush=True)
            os._exit(1)
        self._releasing = False

    # The end ----------------------------------------------------------------------------------

    def close(self, why: str = "") -> None:
        """Says good-bye and ends the thread. `why`: the exception that ends the process, or ""."""
        if self._stopping:
            return
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join(timeout=2.0)
        if self._chief is not None:
            self._chief.send(kind="bye", why=why)
            self._chief.sock.close()
        for line in self._members.values():
            line.send(kind="gone", rank=self.board.group.rank, why=why)
            line.sock.close()
        self.forget()

    def forget(self) -> None:
        """Closes this process's copies of the connections (after a fork: the child's)."""
        self._stopping = True
        lines = [*self._members.values(), *([self._chief] if self._chief else [])]
        listeners = [self._listener] if self._listener else []
        for sock in [*listeners, self._wake, self._waker, *(line.sock for line in lines)]:
            sock.close()


def start(board: Board) -> RollCall | None:
    """Opens the connections: rank 0 listens, its address and a token travel by the group's own all-gather.

    Returns None, after a warning, where rank 0 cannot be reached: training works, missing ranks are not named.
    """
    import numpy as np
    import tensorflow as tf

    group: Any = board.group
    listener, note = None, b""
    if group.rank == 0:
        listener = socket.create_server((_address(group), 0), backlog=group.size)
        host, port = listener.getsockname()[:2]
        note = json.dumps({"host": host, "port": port, "token": secrets.token_hex(16)}).encode()
    told = group.all_gather(tf.constant(np.frombuffer(note, np.uint8)), "rollcall")
    place = json.loads(bytes(told.numpy()))
    chief = None
    if listener is None:
        try:
            chief = Line(socket.create_connection((place["host"], place["port"]), timeout=10.0))
        except OSError as error:
            print(
                f"tfdist: rank {group.rank} on {group.hosts[group.rank]} cannot reach rank 0 at {place['host']}:"
                f"{place['port']} ({error}); ranks that are missing will not be named",
                file=sys.stderr,
            )
            return None
        chief.send(kind="hello", rank=group.rank, token=place["token"])
    call = RollCall(board, place["token"], listener, chief)
    atexit.register(lambda: call.close(_last_exception()))
    os.register_at_fork(after_in_child=call.forget)
    return call


def _last_exception() -> str:
    value = getattr(sys, "last_value", None)
    return "" if value is None else f"{type(value).__name__}: {value}"[:300]


def _address(group: Any) -> str:
    """The address of this host on which the other ranks reach it."""
    if group.local_size == group.size:
        return "127.0.0.1"
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            with contextlib.suppress(OSError):
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
        # Connecting a datagram socket sends nothing; it asks the routing table for our side's address.
        for target in [h for h in group.hosts if h != group.hosts[group.rank]] + ["192.0.2.1"]:
            with contextlib.suppress(OSError):
                probe.connect((target, 9))
                address = str(probe.getsockname()[0])
                if not address.startswith("127."):
                    return address
    return socket.gethostname()
