"""Watches the ranks (or tasks) of one run from outside, until none is left.

One loop over named pipes: it prints what the ranks print, hears how they start and end, and stops
all of them when one fails, when it is interrupted or when the deadline passes; ending.py says when.
Whatever still carries the run's mark at the end is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch import processes, verdict
from tfdist.launch.ending import Ending
from tfdist.launch.logs import LogFiles
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import TAIL_LINES, Lines, Merger
from tfdist.launch.place import Place
from tfdist.launch.plan import Process
from tfdist.launch.rundir import MARK, Failure, RunDir
from tfdist.launch.terminal import Terminal
from tfdist.patience import asked

LEAK_SECONDS = 2.0  # what helper processes (resource trackers) need to notice that they are alone

Sink = Callable[[str, str], None]


class Supervisor:
    """One run. `interrupt` may be called from a signal handler; `run` does everything else.

    Args:
        run_dir: made by the caller, with the pipes of all `places`.
        places: the job's ranks or tasks.
        sink: called with ("out" | "err", text) for everything that is to be shown.
        deadline: seconds after which all ranks are ended, None for never.
        terminal: takes the place of some of rank 0's pipes.
        chief_decides: once the chief has ended well the run has, and the rest ends with it.
        logs: where the output of each rank is written besides.
    """

    def __init__(
        self,
        run_dir: RunDir,
        places: Sequence[Place],
        sink: Sink,
        deadline: float | None = None,
        terminal: Terminal | None = None,
        chief_decides: bool = False,
        logs: LogFiles | None = None,
    ):
        self.run_dir = run_dir
        self.places = places
        self._terminal = terminal
        self._sink = sink
        self._logs = logs
        ends_at = None if deadline is None else time.monotonic() + deadline
        self._ending = Ending(len(places), ends_at, chief_decides)
        self._merger = Merger([place.label for place in places])
        self._runners: dict[int, tuple[int, str]] = {}  # rank -> pid and host, while it is there
        self._away: set[int] = set()  # ranks that the launcher watches, on other hosts or as if they were
        self._leaked: list[str] = []  # there
        self._interrupts: list[int] = []
        self._is_to_leave = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def interrupt(self, signum: int) -> None:
        """Ask for the end of the run; a second call kills what has not ended."""
        self._interrupts.append(signum)
        self._wake(b"i")

    def ask_to_leave(self) -> None:
        """Have the ranks write a checkpoint, where they can, and end: as by SIGTERM, but nobody has interrupted."""
        self._is_to_leave = True
        self._wake(b"l")

    def run(self, process: Process, inherited: Mapping[str, str]) -> Outcome:
        """Start `process`, watch it and the ranks below it until all have ended."""
        selector = selectors.DefaultSelector()
        # Opened for reading and writing: the ranks' opening never waits, and no pipe ends between
        # two writers. The writing end of `alive` exists here alone.
        alive = os.open(self.run_dir.alive, os.O_RDWR | os.O_CLOEXEC)
        pipes = [alive]
        events = Lines()

        def watch(fd: int, what: Callable[[bytes], None]) -> None:
            os.set_blocking(fd, False)
            pipes.append(fd)
            selector.register(fd, selectors.EVENT_READ, what)

        watch(os.open(self.run_dir.events, os.O_RDWR), lambda d: self._hear(events.feed(d)))
        for rank in range(len(self.places)):
            for name in ("out", "err"):
                if (path := self.run_dir.stream(rank, name)).is_fifo():
                    watch(os.open(path, os.O_RDWR), self._printer(rank, name))
        if self._terminal is not None:
            watch(os.dup(self._terminal.controller), self._printer(0, "out"))
        said: list[bytes] = []
        launcher_read, launcher_write = os.pipe()
        watch(launcher_read, said.append)
        child = subprocess.Popen(
            process.argv,
            env=process.environment(inherited),
            stdin=subprocess.DEVNULL,
            stdout=launcher_write,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches this process only, which passes it on
        )
        os.close(launcher_write)
        selector.register(self._wake_read, selectors.EVENT_READ, None)
        pipes += [self._wake_read, self._wake_write]

        ended = threading.Event()

        def wait_for_the_end() -> None:
            child.wait()
            # Set first: whoever was woken by the byte has to find it, or would wait again for ever.
            ended.set()
            self._wake(b"e")

        waiter = threading.Thread(target=wait_for_the_end, daemon=True)
        waiter.start()
        try:
            while not ended.is_set():
                self._turn(selector, child, self._patience())
            leaked = self._clean_up(child)
            while self._turn(selector, child, 0):
                pass
            self._show(self._merger.end())
        finally:
            self._clean_up(child)  # after an exception: a KeyboardInterrupt, a closed output
            waiter.join()
            selector.close()
            for fd in pipes:
                os.close(fd)
        launcher = b"".join(said).decode(errors="replace")
        return self._outcome(child.returncode, launcher, leaked)

    # -- one turn of the loop

    def _patience(self) -> float | None:
        """Seconds until something is to be done even if nobody says a word."""
        now = time.monotonic()
        wait = max(0.0, self._ending.next_at() - now)
        held = self._merger.waiting(now)
        wait = wait if held is None else min(wait, held)
        return None if wait == math.inf else wait

    def _turn(
        self, selector: selectors.BaseSelector, child: subprocess.Popen[bytes], wait: float | None
    ) -> bool:
        """Wait, read what there is, act on it; True if something was read."""
        heard = False
        for key, _ in selector.select(wait):
            data = self._read(key.fd)
            if data == b"" and key.data is not None:
                selector.unregister(key.fd)  # the launcher's own output has ended
                continue
            heard = True
            if key.data is not None:
                key.data(data)
        now = time.monotonic()
        self._show(self._merger.tick(now))
        if self._interrupts:
            signum = self._interrupts[0]
            if len([n for n in self._interrupts if n != signal.SIGUSR1]) > 1:
                self._kill(child)
            if not (self._ending.is_patient or self._tell_patient(child, signum)):
                self._stop(child, signum)
        elif self._is_to_leave and not (self._ending.is_patient or self._tell_patient(child, signal.SIGTERM)):
            self._stop(child, signal.SIGTERM)
        due = self._ending.due(now)
        if due == "stop":
            self._stop(child, signal.SIGTERM)
        elif due == "kill":
            self._kill(child)
        return heard

    @staticmethod
    def _read(fd: int) -> bytes:
        try:
            return os.read(fd, 1 << 16)
        except OSError:  # a pseudo-terminal whose other side is closed
            return b""

    def _hear(self, lines: list[str]) -> None:
        for line in lines:
            event = json.loads(line)
            rank = event["rank"]
            if event["event"] == "start":
                self._runners[rank] = (event["pid"], event["host"])
                if event.get("away"):
                    self._away.add(rank)
            elif event["event"] == "note":
                self._sink("err", f"tfdist: {event['text']}\n")
            elif event["event"] == "leaked":
                self._leaked += event["names"]
            elif event["event"] == "end":
                self._ending.hear_ended(rank, event["code"], time.monotonic())
                self._runners.pop(rank, None)
            elif failure := self.run_dir.read_failure(rank):
                peers_lost = verdict.lost_peers(failure)
                self._ending.hear_failed(rank, peers_lost, time.monotonic())
                for place in self.places:  # patience is for a signal from outside, not for a failure
                    self.run_dir.patience_file(place.number).unlink(missing_ok=True)

    def _printer(self, rank: int, name: str) -> Callable[[bytes], None]:
        def take(data: bytes) -> None:
            if self._logs is not None:
                self._logs.write(rank, name, data)
            self._show(self._merger.feed(rank, name, data, time.monotonic()))

        return take

    def _show(self, texts: list[tuple[str, str]]) -> None:
        for stream, text in texts:
            self._sink(stream, text)

    # -- ending

    def _wake(self, reason: bytes) -> None:
        try:
            os.write(self._wake_write, reason)
        except OSError:
            return

    def _tell_patient(self, child: subprocess.Popen[bytes], signum: int) -> bool:
        """Tell those whose programs have asked for time to write a checkpoint; False for none."""
        if signum not in (signal.SIGTERM, signal.SIGUSR1) or self._ending.is_stopped:
            return False
        times = {rank: asked(self.run_dir.patience_file(rank)) for rank in self._runners}
        if not any(times.values()):
            return False
        self._ending.told_patient(max(times.values()), time.monotonic())
        for rank, (pid, _) in list(self._runners.items()):
            if times[rank] and rank not in self._away:
                self._signal(pid, signum)
        if self._away and child.poll() is None:
            child.send_signal(signum)  # spread.py passes it on
        return True

    @staticmethod
    def _signal(pid: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    def _stop(self, child: subprocess.Popen[bytes], signum: int) -> None:
        """Tell all ranks to stop, once. Those not started yet are stopped with the launcher."""
        if self._ending.is_stopped:
            return
        self._ending.stopped(time.monotonic())
        for rank, (pid, _) in list(self._runners.items()):
            if rank not in self._away:
                self._signal(pid, signum)
        if self._away and child.poll() is None:
            child.send_signal(signum)  # spread.py passes it on
            return
        heard_of = len(self._runners) + len(self._ending.ended)
        if heard_of < len(self.places) and child.poll() is None:
            processes.signal_group(child.pid, signal.SIGTERM)

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        if self._ending.killed:
            return
        self._ending.killed = True
        processes.kill(processes.marked(MARK, str(self.run_dir.path)))

    def _clean_up(self, child: subprocess.Popen[bytes]) -> tuple[str, ...]:
        """End every process that carries the run's mark; names those nobody expected."""
        mark = str(self.run_dir.path)
        if child.poll() is None:
            processes.kill(processes.marked(MARK, mark))
        left = processes.wait_gone(MARK, mark, LEAK_SECONDS)
        names = processes.describe(left)
        processes.kill(left)
        return (*names, *self._leaked)

    def _silent(self, rank: int) -> Failure:
        """The failure of a rank whose watching process could not report: SIGKILL leaves no time."""
        pid, host = self._runners[rank]
        if rank in self._away:
            why = "the process that held the connection to its host ended"
            return Failure(rank, host, pid, 1, time.time(), (verdict.HOST_LOST,), why, task=self.places[rank].task)
        return Failure(
            rank=rank,
            host=host,
            pid=pid,
            code=128 + signal.SIGKILL,
            at=time.time(),
            signal=signal.SIGKILL,
            told=self._ending.killed,
            task=self.places[rank].task,
        )

    def _left_in_order(self, first: Failure | None, status: int) -> bool:
        """True where the patient have ended as they meant to: with a checkpoint, or with all done."""
        code = status if first is None else first.code
        return self._ending.is_patient and code in (0, os.EX_TEMPFAIL)

    def _outcome(self, status: int, launcher: str, leaked: tuple[str, ...]) -> Outcome:
        found = [self.run_dir.read_failure(rank) for rank in range(len(self.places))]
        found += [self._silent(rank) for rank in self._runners if found[rank] is None]
        failures = tuple(failure for failure in found if failure is not None)
        afterwards: tuple[Failure, ...] = ()
        if self._ending.done:
            failures, afterwards, status = (), failures, 0
        first = verdict.culprit(failures)
        late = self._ending.overdue
        interrupted = self._interrupts[0] if self._interrupts else 0
        if interrupted and not self._left_in_order(first, status):
            code = 128 + interrupted
        elif first is not None:
            code = first.code
        else:
            code = status if status >= 0 else 128 - status
        return Outcome(
            code=code,
            failures=failures,
            afterwards=afterwards,
            lingering=tuple(self.places[n].who for n in self._ending.lingering),
            culprit=first,
            launcher=launcher,
            unfinished=late or (),
            leaked=() if code or late else leaked,
            tails={r: "\n".join(list(t)[-TAIL_LINES:]) for r, t in self._merger.tails.items()},
            interrupted=interrupted,
        )
