"""What `tfdist run` does, from a checked job to an exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

import tfdist.cluster
from tfdist.launch import links, verdict
from tfdist.launch.ending import GRACE_SECONDS
from tfdist.launch.hosts_plan import HostsJob, plan_hosts
from tfdist.launch.logs import LogFiles
from tfdist.launch.outcome import Outcome
from tfdist.launch.place import CHIEF
from tfdist.launch.plan import (
    Job,
    Process,
    core_warning,
    find_package_root,
    plan,
    rank_cores,
    rank_env,
)
from tfdist.launch.rundir import RunDir
from tfdist.launch.spawn import show
from tfdist.launch.supervise import Supervisor
from tfdist.launch.task_plan import TaskJob, plan_tasks, task_process
from tfdist.launch.terminal import terminal_for, terminal_here

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


AnyJob = Job | TaskJob | HostsJob


class Interruptible(Protocol):
    """Whoever signals that ask for an end are passed to."""

    def interrupt(self, signum: int) -> None: ...


def process_of(job: AnyJob, run_dir: str) -> Process:
    """The one process to start for the job."""
    root = find_package_root(tfdist.cluster.__file__)
    if isinstance(job, HostsJob):
        return plan_hosts(job, run_dir, sys.executable, os.environ, root, terminal_here())
    if isinstance(job, TaskJob):
        return plan_tasks(job, run_dir, sys.executable, os.environ, root)
    return plan(job, run_dir, sys.executable, os.environ, root)


def dry_run(job: AnyJob) -> str:
    """What would be started: the command, and what changes for the program of each rank or task."""
    if isinstance(job, HostsJob):
        return dry_run_hosts(job)
    lines = [process_of(job, "RUN_DIR").shell()]
    for place in job.places:
        env: Mapping[str, str] = os.environ
        if isinstance(job, TaskJob):
            task = job.cluster.tasks()[place.number]
            env = task_process(job.cluster, task, [], sys.executable, env).environment(env)
        env = rank_env(env, place.number, job.cores_per_rank)
        new = " ".join(
            f"{k}={shlex.quote(v)}" for k, v in sorted(env.items()) if os.environ.get(k) != v
        )
        where = ""
        if job.cores_per_rank is not None:
            cores = rank_cores(available_cores(), place.number, job.cores_per_rank)
            where = f" on cores {','.join(map(str, cores))}"
        lines.append(f"{place.who}{where}: {new or 'environment unchanged'}")
    return "\n".join(lines)


def dry_run_hosts(job: HostsJob) -> str:
    """What would be started on several hosts: who is where, and the command for each host."""
    lines = []
    path = process_of(job, "RUN_DIR").environment(os.environ).get("PYTHONPATH", "")
    for index, host in enumerate(job.used):
        who = ", ".join(job.places[seat.number].who for seat in job.seats if seat.host == index)
        command = shlex.join(links.start_command(host, job.ssh, path))
        lines.append(f"{host.name}: {who}: {command}")
    program = " ".join([job.program.target, *job.program.args])
    lines.append(f"each runs {program}; addresses and ports are chosen when all hosts have answered")
    return "\n".join(lines)


def run(job: AnyJob, log_dir: str | None = None) -> int:
    """Run the job, show its output and the first failure; the exit code for the command.

    That is the code of the first rank or task to fail, 128 + n where signal n ended it, or where
    signal n ended this command; 75 where they have left with a checkpoint. A job of tasks has gone
    well where its chief has, or worker 0 without one.

    Raises:
        OSError: `log_dir`, where each process' output is to be written besides, cannot be made.
    """
    logs = open_logs(log_dir, job)
    outcome = run_once(job, logs)
    explain_run(job, outcome, logs)
    return outcome.code


def open_logs(log_dir: str | None, job: AnyJob, again: bool = False) -> LogFiles | None:
    """The job's log files; None without a directory for them. OSError as for `run`."""
    return None if log_dir is None else LogFiles(Path(log_dir), job.places, again)


def run_once(
    job: AnyJob, logs: LogFiles | None, begun: Callable[[Supervisor], None] | None = None
) -> Outcome:
    """Run the job and show its output; how it ended.

    Signals that ask for an end stop the ranks, unless whoever calls sees to that: `begun` gets the
    supervisor then.
    """
    several = isinstance(job, HostsJob)
    warning = core_warning(job.places, job.cores_per_rank, len(available_cores()))
    if warning and not several:
        say(warning)
    of_tasks = any(place.task for place in job.places)
    run_dir = RunDir.create(len(job.places))
    terminal = None if several else terminal_for(run_dir, terminal_here())
    try:
        process = process_of(job, str(run_dir.path))
        supervisor = Supervisor(
            run_dir, job.places, show, terminal=terminal, chief_decides=of_tasks, logs=logs
        )
        if begun is not None:
            begun(supervisor)
            return supervisor.run(process, os.environ)
        with signals_passed_to(supervisor):
            return supervisor.run(process, os.environ)
    finally:
        run_dir.remove()
        if terminal is not None:
            terminal.close()
        if logs is not None:
            logs.close()


def explain_run(job: AnyJob, outcome: Outcome, logs: LogFiles | None) -> None:
    """Say on stderr what went wrong with the job, and where its log files are."""
    names = [place.task for place in job.places]
    first = job.places[CHIEF].who if "chief/0" not in names else "the chief"
    launcher = "the launcher of the tasks" if any(names) else "Horovod's launcher"
    several = isinstance(job, HostsJob)
    explain(outcome, "the start over several hosts" if several else launcher, first)
    if logs is not None:
        tell_of_logs(logs, outcome)


def tell_of_logs(logs: LogFiles, outcome: Outcome) -> None:
    """Say where the first failure's output is, or that it could not all be written."""
    if logs.problem:
        say(f"not all output was written: {logs.problem}.")
    elif outcome.code and outcome.culprit is not None:
        say(f"its whole output is in {logs.paths[outcome.culprit.rank, 'err']} and .out beside it.")


@contextmanager
def signals_passed_to(supervisor: Interruptible) -> Iterator[None]:
    """Have the signals that ask for an end stop the ranks; the previous handlers come back."""

    def handle(signum: int, frame: FrameType | None) -> None:
        supervisor.interrupt(signum)

    previous = {
        signum: signal.signal(signum, handle)
        for signum in STOP_SIGNALS
        # `nohup tfdist run ...` means to outlive the terminal.
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def explain(outcome: Outcome, launcher: str, chief: str) -> None:
    """Say on stderr what went wrong, the culprit's traceback last."""
    for failure in outcome.afterwards:
        if not failure.told and not verdict.lost_peers(failure):
            say(f"after {chief} had ended, {verdict.headline(failure)}")
    if outcome.lingering:
        late = ", ".join(outcome.lingering)
        say(f"{late} had not ended {GRACE_SECONDS:g} s after {chief}, and was ended.")
    if outcome.leaked:
        say("these processes outlived the program and were ended:", *outcome.leaked)
    first = outcome.culprit
    if first is not None and first.code == outcome.code == os.EX_TEMPFAIL:
        say(f"left with exit code {outcome.code}: start the job again to go on; no process is left.")
        return
    if outcome.interrupted:
        name = verdict.signal_name(outcome.interrupted)
        say(f"ended by {name}; no process is left.")
        return
    if outcome.code and (first is None or first.told):
        # No rank failed by itself: the launcher could not start them, or was ended from outside.
        say(f"{launcher} failed.", *outcome.launcher.strip().splitlines())
    if first is not None:
        say(*verdict.report(outcome.failures).splitlines())


def say(*lines: str) -> None:
    """Write lines to stderr, the first with this command's name."""
    sys.stderr.write("\n".join(("tfdist: " + lines[0], *lines[1:])) + "\n")
    sys.stderr.flush()
