"""What `tfdist run` does, from a checked job to an exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import tfdist.cluster
from tfdist.launch import verdict
from tfdist.launch.ending import GRACE_SECONDS
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
from tfdist.launch.terminal import terminal_for

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def process_of(job: Job | TaskJob, run_dir: str) -> Process:
    """The one process to start for the job."""
    root = find_package_root(tfdist.cluster.__file__)
    if isinstance(job, TaskJob):
        return plan_tasks(job, run_dir, sys.executable, os.environ, root)
    return plan(job, run_dir, sys.executable, os.environ, root)


def dry_run(job: Job | TaskJob) -> str:
    """What would be started: the command, and what changes for the program of each rank or task."""
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


def run(job: Job | TaskJob) -> int:
    """Run the job, show its output and the first failure; the exit code for the command.

    That is the code of the first rank or task to fail, 128 + n where signal n ended it, or where
    signal n ended this command; 75 where they have left with a checkpoint. A job of tasks has gone
    well where its chief has, or worker 0 without one.
    """
    if warning := core_warning(job.places, job.cores_per_rank, len(available_cores())):
        say(warning)
    of_tasks = isinstance(job, TaskJob)
    run_dir = RunDir.create(len(job.places))
    terminal = terminal_for(run_dir)
    try:
        process = process_of(job, str(run_dir.path))
        supervisor = Supervisor(
            run_dir, job.places, show, terminal=terminal, chief_decides=of_tasks
        )
        with signals_passed_to(supervisor):
            outcome = supervisor.run(process, os.environ)
    finally:
        run_dir.remove()
        if terminal is not None:
            terminal.close()
    without_chief = isinstance(job, TaskJob) and job.cluster.chief is None
    first = job.places[CHIEF].who if without_chief else "the chief"
    explain(outcome, "the launcher of the tasks" if of_tasks else "Horovod's launcher", first)
    return outcome.code


@contextmanager
def signals_passed_to(supervisor: Supervisor) -> Iterator[None]:
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
