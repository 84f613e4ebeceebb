"""Finding and ending processes. No policy: who is ended, and when, is decided elsewhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

import psutil


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def marked(name: str, value: str) -> list[psutil.Process]:
    """All processes of this user, but for this one, whose environment has `name` set to `value`.

    A process takes its environment from whoever started it, so this finds the grandchildren too
    whose parents have ended. Zombies have no environment any more and are not found.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
        except (psutil.Error, OSError):  # ended just now, or another user's
            continue
    return found


def wait_gone(name: str, value: str, seconds: float) -> list[psutil.Process]:
    """Wait until no process is `marked`, at most `seconds`; returns those that are left."""
    end = time.monotonic() + seconds
    while processes := marked(name, value):
        left = end - time.monotonic()
        if left <= 0:
            break
        psutil.wait_procs(processes, timeout=left)
    return processes


def describe(processes: Sequence[psutil.Process]) -> tuple[str, ...]:
    """Pid and command line of each that is still there."""
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return tuple(lines)


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL each, and wait until it is gone."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)


def signal_group(leader: int, signum: int) -> None:
    """Send `signum` to the process group of `leader`; nothing happens where it is gone."""
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):
        return
