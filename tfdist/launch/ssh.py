"""The command that starts a process on another host. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import PLACE_VARIABLES
from tfdist.launch.hosts import Host

# ssh's own code for its failures; whatever else comes from the remote side.
FAILED = 255


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached, by the names of `horovodrun`'s options; the rest is ssh's configuration.

    Attributes:
        port: None for ssh's own choice.
        identity_file: the private key, None for ssh's own choice.
        connect_seconds: to wait for a connection.
    """

    port: int | None = None
    identity_file: str | None = None
    connect_seconds: int = 10

    def command(self, host: Host) -> list[str]:
        """ssh to `host`, without what is to be run there.

        It never asks: a password or an unknown host key is a failure. No terminal, no agent, no X11.
        """
        words = ["ssh", "-T", "-a", "-x", "-o", "BatchMode=yes"]
        words += ["-o", f"ConnectTimeout={self.connect_seconds}"]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return [*words, "--", host.target]


# What belongs to this host or login; everything else goes along, as under horovodrun.
KEPT_HERE = re.compile(
    r"BASH_FUNC_.*|DBUS_.*|DISPLAY|HOME|HOSTNAME|KRB5CCNAME|LOGNAME|LS_COLORS|MAIL|OLDPWD|PWD|SHELL|SHLVL|SSH_.*|TERM"
    r"|TMPDIR|TFDIST_RUN_DIR|TF_CONFIG|USER|WINDOWID|XAUTHORITY|XDG_.*|_"
)


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that processes on other hosts get from the environment of the launching one.

    They travel inside ssh's connection, on no command line.
    """
    return {
        name: value
        for name, value in env.items()
        if not KEPT_HERE.fullmatch(name) and name not in PLACE_VARIABLES
    }


def connect_seconds(start: float) -> int:
    """Of the seconds for a whole start, those for a connection."""
    return max(1, int(start) // 2)


def remote_shell(directory: str, python: str, arguments: Sequence[str], path: str = "") -> str:
    """A line for the remote user's shell: change to the directory, then become Python.

    Args:
        directory: where to run.
        python: the interpreter's path there.
        arguments: its arguments.
        path: value of PYTHONPATH, "" to leave it as it is.
    """
    env = ["env", f"PYTHONPATH={path}"] if path else []
    return f"cd {shlex.quote(directory)} && exec {shlex.join([*env, python, *arguments])}"


def failure(host: Host, command: Sequence[str], code: int, said: str, python: str) -> str:
    """What to say of a host on which nothing could be started: what happened, and the remedy.

    Args:
        host: the host.
        command: what was run here.
        code: its exit code.
        said: what it wrote on stderr.
        python: the interpreter that was to be started there.
    """
    text = said.strip().splitlines()
    last = text[-1] if text else f"exit code {code}"
    lower = said.lower()
    shown = shlex.join(command)
    if code == FAILED:
        if "host key verification failed" in lower:
            cure = f"Its key is unknown or has changed: run `{shown}` by hand without BatchMode, and check it."
        elif "permission denied" in lower:
            cure = "Put your public key into its authorized_keys (ssh-copy-id), or choose a key by -i."
        elif "could not resolve" in lower:
            cure = "Correct the name, or add it to DNS or /etc/hosts."
        elif "connection refused" in lower:
            cure = "Start sshd there, or choose its port by -p."
        else:
            cure = "See that the host is up, and that this machine reaches its ssh port."
        return f"{host.name} cannot be reached by ssh ({last}). {cure} The command was: {shown}"
    if "no module named" in lower and "tfdist" in lower:
        return f"{host.name} has no tfdist for {python}: install the same environment there. It said: {last}"
    if code == 127 or "no such file" in lower and python in said:
        return f"{host.name} has no {python}: install the same environment at the same path. It said: {last}"
    if "cd:" in lower or "can't cd" in lower:
        return f"{host.name} lacks the directory that this command runs in: {last}"
    return f"{host.name} could not start {python} (exit code {code}): {last}"
