"""How much of the machine other programs use: figures taken while they run are of no use."""

from __future__ import annotations

import contextlib
import os
import time

import psutil


def _busy() -> float:
    """CPU seconds that all programs have used, of all cores together."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _of(pids: list[int]) -> float:
    """CPU seconds that these processes have used."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it failed, of which others tell
            used = psutil.Process(pid).cpu_times()
            total += used.user + used.system
    return total


class Others:
    """What ran between entering and leaving.

    Attributes:
        cores: kept busy by programs other than `pids`; 0.0 on a quiet machine.
        own: CPU seconds of `pids`.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.cores = self.own = 0.0

    def __enter__(self) -> Others:
        self._start = time.perf_counter(), _busy(), _of(self._pids)
        return self

    def __exit__(self, *exc: object) -> None:
        start, busy, own = self._start
        passed = time.perf_counter() - start
        self.own = _of(self._pids) - own
        self.cores = max(0.0, (_busy() - busy - self.own) / passed)


def wait(limit: float, patience: float) -> None:
    """Returns when the others keep less than `limit` cores busy, after `patience` seconds at the latest."""
    ends = time.monotonic() + patience
    while time.monotonic() < ends:
        with Others([os.getpid()]) as others:
            time.sleep(0.2)
        if others.cores < limit:
            return
