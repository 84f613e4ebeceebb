"""How ranks that no Horovod launcher has started find each other: rank 0 serves, the others come.

    rank 1   PUT /tfdist/1 {size, names, host} ------------------------------> rank 0
    rank 2   PUT /tfdist/2 ---------------------------------------------------> rank 0
             GET /tfdist/go, 404 while some are missing ...
    rank 0   all are there:  200 {address}  ----------------------------------> ranks 1, 2
    each     sets the variables that Horovod's launcher would have set

The same server is the key-value store through which Horovod's Gloo then connects the ranks, by plain
HTTP. It lives as long as rank 0's process. Each rank takes the network interface by which it reaches
rank 0, whatever that is called on its host.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import time
import uuid
from typing import Any

import psutil

from tfdist.cluster import gloo_variables
from tfdist.comm.hall import ASK, DEADLINE, Hall, Teller
from tfdist.comm.watch import checked_seconds
from tfdist.meeting import Meeting
from tfdist.tf_config import host_and_port

DEFAULT_SECONDS = 600.0  # a cluster may have to fetch an image on one of its hosts first
PATIENCE = 5.0  # seconds for an answer
LOST = 15.0  # seconds without one, after which a rank 0 that has answered before is gone
IFACE = "HOROVOD_GLOO_IFACE"


def join(meeting: Meeting) -> None:
    """Returns when all ranks have met; the environment then tells Horovod, and `World`, this one's place.

    Raises:
      RuntimeError: ranks did not come in time (they are named), one was started for another job, or rank 0's
        address cannot be taken.
      ValueError: TFDIST_START_DEADLINE is no number of seconds.
    """
    kept = {IFACE: os.environ[IFACE]} if IFACE in os.environ else {}
    os.environ.update(meet(meeting, _seconds()) | kept)


def meet(meeting: Meeting, seconds: float) -> dict[str, str]:
    """Meets the others; the variables by which Horovod finds them. Raises as `join`."""
    host, port = host_and_port(meeting.address)
    if meeting.rank == 0:
        mine = address = Hall(meeting, host, port, seconds).wait()
    else:
        mine, address = _Guest(meeting, host, port).wait(seconds)
    iface = interface_of(mine)
    return gloo_variables(meeting.rank, meeting.size, meeting, meeting.host, address, port, iface)


def interface_of(address: str) -> str:
    """The network interface of this host that has the address.

    Raises:
      RuntimeError: none has.
    """
    interfaces = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.address == address for entry in entries):
            return str(name)
    if ipaddress.ip_address(address).is_loopback:  # 127.0.1.1 is not written anywhere
        return interface_of("127.0.0.1")
    raise RuntimeError(
        f"{socket.gethostname()} has no network interface with the address {address}; it has "
        f"{', '.join(interfaces)}. Say by {IFACE} which one the ring is to use."
    )


class _Guest:
    """The side of a rank that is not 0."""

    def __init__(self, meeting: Meeting, host: str, port: int) -> None:
        self.meeting, self._host, self._port = meeting, host, port
        self._reason = ""
        self._told: dict[str, Any] = {"names": meeting.names, "host": socket.gethostname(), "process": uuid.uuid4().hex}
        self._told["common"] = meeting.common

    def wait(self, seconds: float) -> tuple[str, str]:
        """Until all have come; addresses of this host and of rank 0's, as this one reaches it.

        Raises:
          RuntimeError: rank 0 does not answer in time, refuses this rank, or gives up.
        """
        teller, ends = Teller(self.meeting), time.monotonic() + seconds
        met, heard = False, 0.0
        while True:
            answer = self._ask(met)
            if answer is not None:
                code, text, mine, theirs = answer
                if code in (409, 410):
                    raise RuntimeError(f"{self._where()}: {text}.")
                if met and code == 200:
                    if ipaddress.ip_address(mine).is_loopback:
                        mine = json.loads(text)["address"]  # on rank 0's host: by what the others reach it
                        theirs = mine
                    return mine, theirs
                met, heard = met or code == 200, time.monotonic()
            elif met and time.monotonic() - heard > LOST:
                raise RuntimeError(f"{self._where()}: rank 0 at {self.meeting.address} ended before all had come.")
            if time.monotonic() > ends:
                raise RuntimeError(
                    f"{self._where()}: rank 0 ({self.meeting.names[0]}) at {self.meeting.address} "
                    + (f"was reached, but other ranks did not come within {seconds:g} s." if met else
                       f"gave no answer within {seconds:g} s ({self._reason}). Start it there, and see that no "
                       f"firewall is between; set {DEADLINE} (seconds) to wait longer.")
                )  # fmt: skip
            teller.tell("other ranks" if met else f"rank 0 at {self.meeting.address} ({self._reason})")
            time.sleep(ASK)

    def _ask(self, met: bool) -> tuple[int, str, str, str] | None:
        """Says hello, or asks whether to go: code, text, own address, rank 0's; None where there is no answer."""
        link = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE)
        with contextlib.closing(link):
            try:
                link.connect()
                mine, theirs = link.sock.getsockname()[0], link.sock.getpeername()[0]
                if met:
                    link.request("GET", f"/tfdist/go/{self.meeting.rank}/{self._told['process']}")
                else:
                    link.request("PUT", f"/tfdist/{self.meeting.rank}", json.dumps(self._told))
                answer = link.getresponse()
                return answer.status, answer.read().decode(), mine, theirs
            except (OSError, http.client.HTTPException) as error:
                self._reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                return None

    def _where(self) -> str:
        return f"{self.meeting.me} on {socket.gethostname()}"


def _seconds() -> float:
    text = os.environ.get(DEADLINE)
    return DEFAULT_SECONDS if not text else checked_seconds(text, DEADLINE)
