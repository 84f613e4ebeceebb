"""Rank 0's side of a rendezvous: who has come, who is refused, and Gloo's key-value store. See rendezvous.py."""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import threading
import time
from typing import Any

import psutil

from tfdist.meeting import Meeting

DEADLINE = "TFDIST_START_DEADLINE"  # seconds
TELL = 10.0  # seconds between two lines about ranks that are not there yet
ASK = 0.2  # seconds between two looks of a rank
AWAY = 5.0  # seconds without one after which a rank counts as gone


class Hall:
    """Rank 0's side: the server, and who has come.

    Args:
      meeting: rank 0's.
      seconds: for everything; a cluster's DNS may learn a new pod's name a moment after the pod starts.
      host, port: where to listen. A name of this host that leads to a loopback address only (Debian's 127.0.1.1)
        would shut the others out: then, and where the address is another machine's that forwards to this one, it
        listens on all addresses.
    """

    def __init__(self, meeting: Meeting, host: str, port: int, seconds: float) -> None:
        from horovod.runner.http.http_server import RendezvousHandler

        self.meeting, self._ends = meeting, time.monotonic() + seconds
        self._seconds = seconds
        self.came: dict[int, tuple[str, str]] = {}  # rank -> its host and process
        self._seen: dict[int, float] = {}  # rank -> when it last asked
        self._last_came = 0.0
        self._reached_at: set[str] = set()  # addresses of this host by which they came
        self._changed = threading.Condition()
        self._answer: tuple[int, str] | None = None  # for those who ask whether to go
        hall = self

        class Door(RendezvousHandler):  # type: ignore[misc]
            """Horovod's handler, and the rooms below /tfdist/."""

            def do_PUT(self) -> None:  # noqa: N802
                if self.path.startswith("/tfdist/"):
                    body = self.rfile.read(int(self.headers["Content-Length"]))
                    answer(self, *hall.enter(self.path.split("/")[2], body, self.connection.getsockname()[0]))
                else:
                    super().do_PUT()

            def do_GET(self) -> None:  # noqa: N802
                if self.path.startswith("/tfdist/"):
                    answer(self, *(hall.go(self.path.split("/")[3:]) or (404, "")))
                else:
                    super().do_GET()

        where = bind_address(host, meeting, seconds)
        try:
            serve(where, port, Door)
        except OSError as error:
            raise RuntimeError(
                f"{meeting.me} on {socket.gethostname()} cannot listen at {meeting.address} for the other ranks: "
                f"{error.strerror or error}. End what holds the port, or give the job another one."
            ) from error

    def enter(self, who: str, body: bytes, reached_at: str) -> tuple[int, str]:
        """A rank has come; the answer to it."""
        with self._changed:
            self._forget_the_gone(AWAY)
            problem = refusal(self.meeting, who, body, self.came if self._answer is None else None)
            if problem:
                return 409, problem
            self.came[int(who)] = caller(json.loads(body))
            self._seen[int(who)] = self._last_came = time.monotonic()
            self._reached_at.add(reached_at)
            self._changed.notify_all()
            return 200, ""

    def go(self, who: list[str]) -> tuple[int, str] | None:
        """What to tell a rank, [number, process], that asks whether all are there."""
        with self._changed:
            if who and who[0].isdecimal() and self.came.get(int(who[0]), ("", ""))[1:] == tuple(who[1:]):
                self._seen[int(who[0])] = time.monotonic()
                self._changed.notify_all()
            return self._answer

    def _forget_the_gone(self, seconds: float) -> None:
        """Gives free the places of ranks that have not asked for so long: they have ended, and may be started again."""
        now = time.monotonic()
        for rank in [r for r in self.came if self._answer is None and now - self._seen[r] > seconds]:
            del self.came[rank]

    def wait(self) -> str:
        """Until all have come; the address of this host by which they did.

        Raises:
          RuntimeError: some have not, in time.
        """
        meeting, teller = self.meeting, Teller(self.meeting)
        while True:
            with self._changed:
                self._forget_the_gone(AWAY)
                missing = [meeting.names[r] for r in range(1, meeting.size) if r not in self.came]
                # Those that came before the last one must have asked since: one that was killed does not.
                if not missing and all(self._seen[rank] >= self._last_came for rank in self.came):
                    address = best(self._reached_at)
                    self._answer = 200, json.dumps({"address": address})
                    return address
                left = self._ends - time.monotonic()
                if left <= 0:
                    missing = missing or [meeting.names[r] for r in self.came if self._seen[r] < self._last_came]
                    text = (
                        f"after {self._seconds:g} s there is no {', '.join(missing)} at {meeting.address}, where "
                        f"{meeting.me} on {socket.gethostname()} waits. Start the same script there, and see that "
                        f"this address is reached from there; set {DEADLINE} (seconds) to wait longer"
                    )
                    self._answer = 410, text
                    break
                self._changed.wait(min(left, AWAY / 2))
            if missing:
                teller.tell(", ".join(missing))
        time.sleep(3 * ASK)  # those who came hear of it
        raise RuntimeError(text)


def serve(address: str, port: int = 0, handler: Any = None) -> Any:
    """Starts Gloo's key-value store: Horovod's server, `server_port` its port, by default with Horovod's handler.

    This module is allowed Horovod's launcher, of which it takes the store, plain Python; operations are
    comm/horovod.py's.

    Raises:
      OSError: the address cannot be taken.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, port), handler or RendezvousHandler, 0)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="tfdist-rendezvous", daemon=True).start()
    return server


def answer(handler: Any, code: int, text: str) -> None:
    """Sends an answer."""
    data = text.encode()
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def bind_address(host: str, meeting: Meeting, seconds: float = 0.0) -> str:
    """The address to listen at for the ranks: the host's own where it has one that is not loopback, else all.

    Raises:
      RuntimeError: the name of the host is not known here, and was not learnt in `seconds`.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() + ASK > ends:
                raise RuntimeError(
                    f"{meeting.me} on {socket.gethostname()} does not know its own address {meeting.address}: "
                    f"{error.strerror or error}. Write one of this host, an IPv4 address or a name that has one."
                ) from error
            time.sleep(ASK)
    address = str(found[0][4][0])
    alone = meeting.local_size == meeting.size
    if ipaddress.ip_address(address).is_loopback:
        return address if alone else ""
    mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return address if address in mine else ""


def caller(told: dict[str, Any]) -> tuple[str, str]:
    """Host and process of a message."""
    return str(told["host"]), str(told["process"])


def refusal(meeting: Meeting, who: str, body: bytes, came: dict[int, tuple[str, str]] | None) -> str:
    """Why a rank cannot join, "" if it can. `came`: the ranks so far, None once all have gone on."""
    try:
        told = json.loads(body)
        rank, names, me = int(who), list(told["names"]), caller(told)
    except (ValueError, KeyError, TypeError):
        return "the message was not that of a rank; all ranks need the same version of tfdist"
    if names == list(meeting.names) and told.get("common") != meeting.common:
        return (
            f"its {meeting.origin} has {told.get('common')}, and that of rank 0 at {meeting.address} "
            f"{meeting.common}. Give every process the same {meeting.origin}"
        )
    if not 0 < rank < meeting.size or names != list(meeting.names):
        return (
            f"it was started for {len(names)} ranks ({', '.join(names)}), and rank 0 at {meeting.address} for "
            f"{meeting.size} ({', '.join(meeting.names)}). Give every process the same {meeting.origin}"
        )
    if came is None:
        return (
            f"the job at {meeting.address} has begun with another {meeting.names[rank]}. A ring cannot take a rank "
            "back: end all of them and start the job again from its last checkpoint"
        )
    if came.get(rank, me) != me:
        return (
            f"another process, on {came[rank][0]}, is {meeting.names[rank]} already; the one on {me[0]} needs a place "
            "of its own"
        )
    return ""


def best(addresses: set[str]) -> str:
    """The one by which ranks on other hosts came, rather than loopback."""
    return min(addresses, key=lambda address: (ipaddress.ip_address(address).is_loopback, address))


class Teller:
    """Says now and then for whom this rank waits."""

    def __init__(self, meeting: Meeting) -> None:
        self._me, self._began = meeting.me, time.monotonic()
        self._told = self._began

    def tell(self, whom: str) -> None:
        """Says so, if it is time."""
        now = time.monotonic()
        if now - self._told >= TELL:
            self._told = now
            print(f"tfdist: {self._me} has waited {now - self._began:.0f} s for {whom}", file=sys.stderr, flush=True)
