"""A process that runs a tenth of the time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time


class Slowed:
    """A context manager: stops and continues a process by turns, from a thread.

    Args:
        pid: of the process.
        share: of the time that it runs.
        period: seconds from one stop to the next.

    Attributes:
        ran: share of the time that it did run; this thread is late now and then.
    """

    def __init__(self, pid: int, share: float = 0.1, period: float = 0.04) -> None:
        self._pid, self._run, self._stop = pid, share * period, (1 - share) * period
        self.ran = 1.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._alternate, daemon=True)

    def __enter__(self) -> Slowed:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)

    def _alternate(self) -> None:
        running = stopped = 0.0
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while not self._over.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                then = time.monotonic()
                self._over.wait(self._stop)
                os.kill(self._pid, signal.SIGCONT)
                now = time.monotonic()
                self._over.wait(self._run)
                stopped, running = stopped + now - then, running + time.monotonic() - now
                self.ran = running / (running + stopped)
