"""When the processes of a run are to be stopped and killed. Pure: events and times in.

Times in seconds. A failure, in any job:

    0 ... others may end by themselves ... 1 ... SIGTERM ... 5 ... SIGKILL ... 8

In a parameter-server job the chief decides: once it has ended with 0 the run has gone well, and
the rest is given time:

    0 ... others may end by themselves ... 10 ... SIGTERM ... 14 ... SIGKILL ... 17

A signal to the command, where programs have asked for patience, to write a checkpoint: they alone
are told; when the first of them has ended, or their time is over, it goes on as after a failure.
"""

from __future__ import annotations

import math

from tfdist.launch.place import CHIEF

NATURAL_END_SECONDS = 1.0
KILL_SECONDS = 8.0
GRACE_SECONDS = 10.0


class Ending:
    """What is known about the end of one run.

    Args:
        count: number of processes.
        deadline: time at which all are to be stopped, None for never.
        chief_decides: the run has gone well when process 0 has.

    Attributes:
        ended: numbers of the processes that have ended.
        overdue: those that had not ended at the deadline; None if it was kept.
        lingering: those that had not ended some time after the chief.
    """

    def __init__(self, count: int, deadline: float | None, chief_decides: bool = False):
        self.ended: set[int] = set()
        self.overdue: tuple[int, ...] | None = None
        self.lingering: tuple[int, ...] = ()
        self.killed = False
        self._count = count
        self._deadline = deadline
        self._chief_decides = chief_decides
        self._failed: dict[int, bool] = {}  # number -> it failed because another one was gone
        self._failed_at: float | None = None
        self._done_at: float | None = None
        self._stopped_at: float | None = None
        self._patient_until: float | None = None

    @property
    def done(self) -> bool:
        """True when the chief has ended well and that decides: no failure counts any more."""
        return self._done_at is not None

    @property
    def is_stopped(self) -> bool:
        """True once the processes have been told to stop."""
        return self._stopped_at is not None

    def hear_failed(self, number: int, peers_lost: bool, now: float) -> None:
        """A process has failed; `peers_lost` if it says no more than that another one is gone."""
        if self.done:
            return
        self._failed.setdefault(number, peers_lost)
        if self._failed_at is None:
            self._failed_at = now

    def hear_ended(self, number: int, code: int, now: float) -> None:
        """A process has ended."""
        self.ended.add(number)
        if not self._chief_decides or number != CHIEF or code or self.is_stopped:
            return
        # A task that loses the chief at its end may be heard of before that end is.
        if all(self._failed.values()):
            self._failed.clear()
            self._failed_at = None
            self._done_at = now

    def unfinished(self) -> tuple[int, ...]:
        """Those that have not ended."""
        return tuple(n for n in range(self._count) if n not in self.ended)

    @property
    def is_patient(self) -> bool:
        """True once those that asked for patience have been told to end."""
        return self._patient_until is not None

    def told_patient(self, seconds: float, now: float) -> None:
        """Those that asked for patience are told to end, and may take `seconds`."""
        self._patient_until = now + seconds

    def stopped(self, now: float) -> None:
        """The processes are told to stop."""
        self._stopped_at = now

    def due(self, now: float) -> str:
        """What is to be done: "stop", "kill", or "" for nothing."""
        at, reason = self._next()
        if now < at:
            return ""
        if reason == "deadline":
            self.overdue = self.unfinished()
        elif reason == "done":
            self.lingering = self.unfinished()
        return "kill" if reason == "stopped" else "stop"

    def next_at(self) -> float:
        """The time at which `due` has something to say if nothing is heard until then."""
        return self._next()[0]

    def _next(self) -> tuple[float, str]:
        never = (math.inf, "")
        if self._stopped_at is not None:
            at = self._stopped_at + KILL_SECONDS - NATURAL_END_SECONDS
            return never if self.killed else (at, "stopped")
        times = [never]
        if self._deadline is not None:
            times.append((self._deadline, "deadline"))
        if self._patient_until is not None:
            times.append((self._patient_until, "patience"))
        if self._failed_at is not None:
            times.append((self._failed_at + NATURAL_END_SECONDS, "failed"))
        if self._done_at is not None:
            times.append((self._done_at + GRACE_SECONDS, "done"))
        return min(times)
