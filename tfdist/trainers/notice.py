"""Signals by which a process hears that it has to go, while `fit` runs with a checkpoint to write."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from tfdist import patience

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # of Kubernetes, Slurm, spot machines; of Slurm's --signal=USR1@60
SECONDS = 120.0  # that tfdist's launcher waits for the checkpoint at most; what started the launcher may wait less


_listening: set[Notice] = set()


def _forget_in_child() -> None:
    """A child that a pipeline forks must end by SIGTERM, which is how its parent ends it."""
    for notice in list(_listening):
        notice.forget(parent=False)


os.register_at_fork(after_in_child=_forget_in_child)


class Notice:
    """Notes a signal instead of ending at it. A handler that the program itself has set is left alone.

    Attributes:
      told: the number of the signal that came, or -1 for a call of `tell`; 0 for none.
    """

    def __init__(self) -> None:
        self.told = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """From now on. Only the main thread of a program may do that; elsewhere signals act as always."""
        self.told = 0
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._before[number] = signal.signal(number, self._hear)
        if signal.SIGTERM in self._before:
            patience.ask(SECONDS)
        _listening.add(self)

    def forget(self, parent: bool = True) -> None:
        """Signals act as before `listen`."""
        _listening.discard(self)
        if self._before and parent:
            with contextlib.suppress(OSError):  # the directory of a run that is over
                patience.ask_no_longer()
        while self._before:
            signal.signal(*self._before.popitem())

    def tell(self) -> None:
        """As a signal would. From any thread, or from a handler of the program's own."""
        self.told = self.told or -1

    def repeat(self) -> None:
        """A signal that came too late to be acted on takes its usual way."""
        if self.told > 0:
            os.kill(os.getpid(), self.told)
        self.told = 0

    @property
    def name(self) -> str:
        """What to call what came."""
        return signal.Signals(self.told).name if self.told > 0 else "a call of leave()"

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.told = number
