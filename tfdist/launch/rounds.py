"""Runs an elastic job, round after round; elastic.py decides, this carries it out."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from tfdist.cluster import JOB, ROUND
from tfdist.launch import elastic
from tfdist.launch.discovery import Discovery, DiscoveryError
from tfdist.launch.elastic import REST_SECONDS, SHORT_SECONDS, Limits
from tfdist.launch.hosts import Host, total_slots
from tfdist.launch.logs import LogFiles
from tfdist.launch.outcome import Outcome
from tfdist.launch.run import AnyJob, explain_run, open_logs, run_once, say, signals_passed_to
from tfdist.launch.supervise import Supervisor

LOOK_SECONDS = 1.0


class Rounds:
    """One elastic job.

    Args:
        job_on: the job of a round on these hosts, a rank for each slot.
        discovery: asks for hosts.
        limits: what the user allows.
        log_dir: as for `run`; files go on from round to round.
    """

    def __init__(
        self,
        job_on: Callable[[Sequence[Host]], AnyJob],
        discovery: Discovery,
        limits: Limits,
        log_dir: str | None = None,
    ):
        self._job_on, self._discovery, self._limits = job_on, discovery, limits
        self._log_dir = log_dir
        self._resting: dict[str, float] = {}  # host -> until when
        self._supervisor: Supervisor | None = None
        self._signal = 0
        self._told = ""

    def interrupt(self, signum: int) -> None:
        """From a signal handler: end the job."""
        self._signal = self._signal or signum
        if self._supervisor is not None:
            self._supervisor.interrupt(signum)

    def run(self) -> int:
        """Run rounds until the job is done or cannot go on; the exit code for the command."""
        with signals_passed_to(self):
            return self._run()

    def _run(self) -> int:
        os.environ[JOB] = uuid.uuid4().hex
        number = short = 0
        while True:
            hosts = self._await_team()
            if not hosts:
                return 128 + self._signal if self._signal else 1
            names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
            ranks = total_slots(hosts)
            say(f"round {number}: {ranks} rank{'s' * (ranks > 1)} on {names}")
            os.environ[ROUND] = str(number)
            job, began = self._job_on(hosts), time.monotonic()
            logs = open_logs(self._log_dir, job, again=number > 0)
            outcome, asked = self._round(job, hosts, logs)
            seconds = time.monotonic() - began
            after = elastic.judge(outcome, asked, seconds, short, number, self._limits)
            if not after.again:
                explain_run(job, outcome, logs)
                if after.why:
                    say(f"the job goes no further: {after.why}.")
                return outcome.code
            say(f"round {number} ended after {seconds:.0f} s: {after.why}. Going on from the last checkpoint.")
            for name in after.lost:
                self._resting[name] = time.monotonic() + REST_SECONDS
            short = 0 if asked or seconds >= SHORT_SECONDS else short + 1
            number += 1

    def _round(self, job: AnyJob, hosts: Sequence[Host], logs: LogFiles | None) -> tuple[Outcome, bool]:
        """One round, and whether its ranks were asked to leave because hosts have changed."""
        over, asked = threading.Event(), threading.Event()

        def watch() -> None:
            suspicion = 0  # a change counts when it is seen twice
            while not over.wait(LOOK_SECONDS):
                then = self._team()
                suspicion = suspicion + 1 if then and elastic.changed(hosts, then) else 0
                if suspicion >= 2 and self._supervisor is not None:
                    asked.set()
                    self._supervisor.ask_to_leave()
                    return

        def begun(supervisor: Supervisor) -> None:
            self._supervisor = supervisor
            if self._signal:  # in the meantime
                supervisor.interrupt(self._signal)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            outcome = run_once(job, logs, begun)
        finally:
            self._supervisor = None
            over.set()
            watcher.join()
        return outcome, asked.is_set()

    def _team(self) -> tuple[Host, ...]:
        """The hosts of a round that would begin now; () where there are too few, or nobody can tell."""
        try:
            offered = self._discovery.hosts()
        except DiscoveryError as error:
            if str(error) != self._told:
                self._told = str(error)
                say(f"{error}. The hosts stay as they are until it answers.")
            return ()
        now = time.monotonic()
        resting = [name for name, until in self._resting.items() if until > now]
        return elastic.team(offered, resting, self._limits)

    def _await_team(self) -> tuple[Host, ...]:
        """The hosts of the next round, when there are enough; () after the time limit or a signal."""
        ends, told = time.monotonic() + self._limits.wait_seconds, False
        while not self._signal:
            if team := self._team():
                return team
            if time.monotonic() > ends:
                seconds, slots = self._limits.wait_seconds, self._limits.min_np
                say(f"after {seconds:g} s there are no hosts with {slots} slots (--min-np).")
                return ()
            if not told:
                told = True
                say(f"waiting for hosts with {self._limits.min_np} slots (--min-np)")
            time.sleep(LOOK_SECONDS)
        return ()
