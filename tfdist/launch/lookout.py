"""What an agent finds out about its host before the job starts: versions, addresses, who reaches whom."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import psutil

from tfdist.launch.installed import built_controllers
from tfdist.launch.preflight import COMPARED, Facts

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly")
REACH_SECONDS = 3.0
TOKEN = 16  # bytes


def facts(program: str) -> Facts:
    """Of this host; `program` is the file to be run, "" for a module."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Facts(
        python=platform.python_version(),
        versions={name: _version(name) for name in COMPARED},
        controllers=built_controllers(),
        addresses=addresses(),
        program=not program or Path(program).exists(),
        cores=cores,
    )


def addresses() -> tuple[tuple[str, str], ...]:
    """(interface, IPv4 address) of this host, no loopback; first the one at which ssh came in."""
    found = []
    up = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and name in up and up[name].isup:
                found.append((name, entry.address))
    # SSH_CONNECTION: client's address and port, this host's address and port. sshd(1)
    words = os.environ.get("SSH_CONNECTION", "").split()
    mine = words[2] if len(words) == 4 else ""
    found = [pair for pair in found if not pair[1].startswith("127.")]
    return tuple(sorted(found, key=lambda pair: pair[1] != mine))


class Listener:
    """Answers whoever connects with a token, by which they know that it is this host they reached."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(TOKEN)
        self._server = socket.create_server(("", 0), backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                link, _ = self._server.accept()
                with link, contextlib.suppress(OSError):
                    link.sendall(self.token.encode())

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # else accept would hold it open
        self._server.close()


def reached(targets: Sequence[tuple[int, str, int, str]]) -> list[tuple[int, str]]:
    """Those of (host, address, port, token) that are there and give the token: (host, address)."""

    def answers(target: tuple[int, str, int, str]) -> bool:
        _, address, port, token = target
        try:
            with socket.create_connection((address, port), REACH_SECONDS) as link:
                said = b""
                while chunk := link.recv(64):
                    said += chunk
                return said.decode() == token
        except (OSError, UnicodeDecodeError):
            return False

    if not targets:
        return []
    with ThreadPoolExecutor(min(64, len(targets))) as pool:
        good = list(pool.map(answers, targets))
    return [(target[0], target[1]) for target, ok in zip(targets, good, strict=True) if ok]


def _version(name: str) -> str:
    for each in TENSORFLOWS if name == "tensorflow" else (name,):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(each)
    return ""
