"""The launching machine's side of the agents: one process, ssh or the agent itself, for each host."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, cast

import psutil

from tfdist.launch import ssh
from tfdist.launch.hosts import Host
from tfdist.launch.output import Lines
from tfdist.launch.ssh import Ssh

# Without a word from an agent for so long, its host counts as lost. It says something every two.
SILENCE_SECONDS = 15.0
AGENT = ("-u", "-m", "tfdist.launch.agent")
MOST_WAITING = 1000  # messages that were not looked at yet
TAIL = 4000  # characters of stderr that are kept


class HostError(RuntimeError):
    """Something is wrong with a host; the message names it and what to do."""


class Link:
    """One host's agent. What it says is put into `inbox` as (index, message), its end as (index, None).

    Attributes:
        host: the host.
        heard: when it last said something, by `time.monotonic`.
        done: it has said that all of its processes have ended.
        running: it was told to start them.
    """

    def __init__(self, index: int, host: Host, options: Ssh, inbox: queue.SimpleQueue[Any]):
        self.host = host
        self._index, self._inbox = index, inbox
        self.done = self.running = False
        start = start_command(host, options, os.environ.get("PYTHONPATH", ""))
        self._reach = options.command(host)
        self._process = subprocess.Popen(
            start,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C is for the supervisor, which says through this link what is to be done.
            start_new_session=True,
        )
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._stdin, self._stdout, self._stderr = cast("tuple[IO[bytes], IO[bytes], IO[bytes]]", pipes)
        self._said = ""
        self.heard = time.monotonic()
        self._sending = threading.Lock()
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, **command: Any) -> None:
        """One command to the agent; nothing happens where it is gone, which `inbox` tells."""
        data = (json.dumps(command) + "\n").encode()
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._stdin.write(data)
            self._stdin.flush()

    def silent(self, now: float) -> bool:
        """Whether it has not been heard of for too long."""
        return not self.done and now - self.heard > SILENCE_SECONDS

    def why(self) -> str:
        """Why the connection has ended, once it has: a sentence with the remedy."""
        code = self._process.wait()
        self._errors.join(2.0)
        if self.running:
            words = self.last_words() or f"exit code {code}"
            return f"the connection to its agent ended while the job ran ({words})"
        return ssh.failure(self.host, self._reach, code, self._said, sys.executable)

    def last_words(self) -> str:
        """The last line that came from there and was no message."""
        return (self._said.strip().splitlines() or [""])[-1][:200]

    def close(self) -> None:
        """End the agent, and with it whatever it has started."""
        with self._sending, contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        lines = Lines()
        while data := os.read(self._stdout.fileno(), 1 << 16):
            self.heard = time.monotonic()
            for line in lines.feed(data):
                message = message_of(line)
                if message is None:  # a login shell's greeting
                    self._said = (self._said + line + "\n")[-TAIL:]
                else:
                    self._inbox.put((self._index, message))
            while self._inbox.qsize() > MOST_WAITING:  # nobody reads the job's output: let its programs wait, too
                self.heard = time.monotonic()
                time.sleep(0.05)
        self._inbox.put((self._index, None))

    def _read_errors(self) -> None:
        while data := os.read(self._stderr.fileno(), 1 << 16):
            self._said = (self._said + data.decode(errors="replace"))[-TAIL:]


def start_command(host: Host, options: Ssh, path: str) -> list[str]:
    """What to run here to have an agent on the host, with the Python of this one, which is to be at the same place.

    Args:
        host: the host.
        options: how it is reached.
        path: value of PYTHONPATH there, "" to leave it as it is.
    """
    if is_here(host):
        return [sys.executable, *AGENT]
    return [*options.command(host), ssh.remote_shell(os.getcwd(), sys.executable, AGENT, path)]


def message_of(line: str) -> dict[str, Any] | None:
    """What an agent says by a line; None for a line that is not an agent's."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "say" in message else None


def is_here(host: Host) -> bool:
    """Whether the host is this machine: its name leads to an address of ours, and no other user is asked for."""
    if host.user:
        return False
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # ssh may know the name from its own configuration
    mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return any(str(address).startswith("127.") or address == "::1" or address in mine for address in found)
