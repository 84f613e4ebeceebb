"""Hosts for tests: network namespaces of this machine, each with an address, a name and an sshd of its own.

       host 0                      hub                     host 1
    198.18.h.1 (eth0) ---- p0 [ bridge ] p1 ---- 198.18.h.2 (lan1)

They share processes, files and users; the network, the hostname and /etc/hosts are their own. A host's own
name leads to 127.0.1.1 there, as Debian sets it up. Interfaces have other names on other hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

ETC = Path("/etc/netns")  # `ip netns exec` shows what is there as /etc


def missing() -> str:
    """Why there can be no such hosts here, "" where there can."""
    if os.geteuid():
        return "needs root, to make network namespaces"
    tools = {"ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "unshare": "util-linux"}
    lacking = [f"{tool} ({package})" for tool, package in tools.items() if shutil.which(tool, path=_path()) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    name = f"tfdist-{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Hosts:
    """`count` hosts; a context manager.

    Attributes:
        names: "alpha", "beta", ... in each other's /etc/hosts.
        addresses: of each.
        interfaces: name of each one's network interface.
        key: a private key that every host's sshd accepts.
    """

    def __init__(self, count: int, directory: Path, spare_network: bool = False, same_names: bool = False):
        self._id = uuid.uuid4().hex[:6]
        self.names = ["alpha", "beta", "gamma", "delta"][:count]
        self.addresses = [f"198.18.0.{i + 1}" for i in range(count)]
        self.interfaces = ["eth0" if same_names else f"{'eth' if i % 2 == 0 else 'lan'}{i}" for i in range(count)]
        self.key = directory / "key"
        self._directory, self._spare = directory, spare_network
        self._spaces = [f"tfdist-{self._id}-{i}" for i in range(count)]
        self._hub = f"tfdist-{self._id}-hub"
        self._sshds: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """What to run here so that `words` run on a host."""
        name = self.names[host]
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *words]
        return ["ip", "netns", "exec", self._spaces[host], *inside]

    def popen(self, host: int, words: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a process on a host; its output is piped as text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(self.command(host, words), **pipes)  # type: ignore[call-overload, no-any-return]

    def run(
        self, host: int, words: Sequence[str], timeout: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a process on a host to its end."""
        process = self.popen(host, words, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
            pytest.fail(f"{words[:4]}... on {self.names[host]} had not ended after {timeout:g} s:\n{out}\n{err}")
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def processes(self, *words: str) -> list[int]:
        """Processes on these hosts whose command line has all of the words, but for those that only lead there."""
        found = []
        for space in self._spaces:
            for pid in map(int, _do(["ip", "netns", "pids", space]).split()):
                with contextlib.suppress(psutil.Error):
                    line = psutil.Process(pid).cmdline() or ["ip"]
                    if line[0] not in ("ip", "unshare", "sh") and all(word in line for word in words):
                        found.append(pid)
        return found

    def cut_off(self, host: int) -> None:
        """Unplug a host's cable."""
        self._ip(self._hub, "link", "set", f"p{host}", "down")

    def plug_in(self, host: int) -> None:
        """Plug it in again."""
        self._ip(self._hub, "link", "set", f"p{host}", "up")

    def limit(self, mbit: int) -> None:
        """Limit what each host sends, in Mbit/s."""
        for space, interface in zip(self._spaces, self.interfaces, strict=True):
            rate = ["rate", f"{mbit}mbit", "burst", "512kb", "latency", "50ms"]
            _do(["ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *rate])

    def sent(self, host: int) -> int:
        """Bytes that a host has sent, headers included."""
        path = f"/sys/class/net/{self.interfaces[host]}/statistics/tx_bytes"
        return int(_do(["ip", "netns", "exec", self._spaces[host], "cat", path]))

    def _make(self) -> None:
        _do(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)])
        _do(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._directory / "host_key")])
        public = (self._directory / "host_key.pub").read_text().strip()
        (self._directory / "authorized").write_text((self._directory / "key.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)
        _do(["ip", "netns", "add", self._hub])
        self._ip(self._hub, "link", "add", "bridge", "type", "bridge")
        self._ip(self._hub, "link", "set", "bridge", "up")
        for i, space in enumerate(self._spaces):
            _do(["ip", "netns", "add", space])
            peer = ["peer", "name", f"p{i}", "netns", self._hub]
            self._ip(space, "link", "add", self.interfaces[i], "type", "veth", *peer)
            self._ip(self._hub, "link", "set", f"p{i}", "master", "bridge", "up")
            self._ip(space, "address", "add", f"{self.addresses[i]}/24", "dev", self.interfaces[i])
            self._ip(space, "link", "set", "lo", "up")
            self._ip(space, "link", "set", self.interfaces[i], "up")
            if self._spare:  # a network interface that leads nowhere, with the same address everywhere
                self._ip(space, "link", "add", "docker0", "type", "bridge")
                self._ip(space, "address", "add", "198.19.0.1/24", "dev", "docker0")
                self._ip(space, "link", "set", "docker0", "up")
            self._etc(i, public)
        for i in range(len(self._spaces)):
            self._start_sshd(i)

    def _etc(self, host: int, public: str) -> None:
        etc = ETC / self._spaces[host]
        shutil.copytree("/etc/ssh", etc / "ssh")
        known = [f"{name},{address} {public}" for name, address in zip(self.names, self.addresses, strict=True)]
        (etc / "ssh" / "ssh_known_hosts").write_text("\n".join(known) + "\n")
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {self.names[host]}"]
        others = [o for o in range(len(self.names)) if o != host]
        lines += [f"{self.addresses[o]} {self.names[o]}" for o in others]
        (etc / "hosts").write_text("\n".join(lines) + "\n")

    def _start_sshd(self, host: int) -> None:
        options = {
            "HostKey": self._directory / "host_key",
            "AuthorizedKeysFile": self._directory / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PidFile": "none",
            "LogLevel": "QUIET",
        }
        words = [str(shutil.which("sshd", path=_path())), "-D", "-e", "-f", "/dev/null"]
        words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        self._sshds.append(subprocess.Popen(self.command(host, words), start_new_session=True))
        ends = time.monotonic() + 10
        probe = ["sh", "-c", "exec 3<>/dev/tcp/127.0.0.1/22"]
        while subprocess.run(self.command(host, ["bash", *probe[1:]]), capture_output=True).returncode:
            if time.monotonic() > ends:
                raise RuntimeError(f"sshd did not start on {self.names[host]}")
            time.sleep(0.05)

    def _remove(self) -> None:
        for sshd in self._sshds:
            sshd.kill()
            sshd.wait()
        for space in [*self._spaces, self._hub]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _do(["ip", "netns", "del", space])
            shutil.rmtree(ETC / space, ignore_errors=True)

    @staticmethod
    def _ip(space: str, *words: str) -> None:
        _do(["ip", "-n", space, *words])


def _do(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": _path()})
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout
