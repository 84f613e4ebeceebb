"""What `tfdist run` does, from a checked job to an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import tfdist.cluster
from tfdist.launch import verdict
from tfdist.launch.plan import Job, core_warning, find_package_root, plan, rank_cores, rank_env
from tfdist.launch.rundir import RunDir
from tfdist.launch.spawn import show
from tfdist.launch.supervise import Outcome, Supervisor
from tfdist.launch.terminal import terminal_for

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def dry_run(job: Job) -> str:
    """What would be started: the command, and what changes for each rank's program."""
    root = find_package_root(tfdist.cluster.__file__)
    process = plan(job, "RUN_DIR", sys.executable, os.environ, root)
    lines = [process.shell()]
    for rank in range(job.ranks):
        env = rank_env(os.environ, rank, job.cores_per_rank)
        new = " ".join(f"{k}={v}" for k, v in sorted(env.items()) if os.environ.get(k) != v)
        where = ""
        if job.cores_per_rank is not None:
            cores = rank_cores(available_cores(), rank, job.cores_per_rank)
            where = f" on cores {','.join(map(str, cores))}"
        lines.append(f"rank {rank}{where}: {new or 'environment unchanged'}")
    return "\n".join(lines)


def run(job: Job) -> int:
    """Run the job, show its output and the first failure; the exit code for the command.

    That is the code of the first rank to fail, 128 + n where signal n ended it, or where signal n
    ended this command.
    """
    if warning := core_warning(job, len(available_cores())):
        say(warning)
    run_dir = RunDir.create(job.ranks)
    terminal = terminal_for(run_dir)
    try:
        root = find_package_root(tfdist.cluster.__file__)
        process = plan(job, str(run_dir.path), sys.executable, os.environ, root)
        supervisor = Supervisor(run_dir, job.ranks, show, terminal=terminal)
        with signals_passed_to(supervisor):
            outcome = supervisor.run(process, os.environ)
    finally:
        run_dir.remove()
        if terminal is not None:
            terminal.close()
    explain(outcome)
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


def explain(outcome: Outcome) -> None:
    """Say on stderr what went wrong, the culprit's traceback last."""
    if outcome.leaked:
        say("these processes outlived their rank and were ended:", *outcome.leaked)
    if outcome.interrupted:
        name = verdict.signal_name(outcome.interrupted)
        say(f"ended by {name}; no rank is left.")
        return
    first = outcome.culprit
    if outcome.code and (first is None or first.told):
        # No rank failed by itself: the launcher could not start them, or was ended from outside.
        say("Horovod's launcher failed.", *outcome.launcher.strip().splitlines())
    if first is not None:
        say(*verdict.report(outcome.failures).splitlines())


def say(*lines: str) -> None:
    """Write lines to stderr, the first with this command's name."""
    sys.stderr.write("\n".join(("tfdist: " + lines[0], *lines[1:])) + "\n")
    sys.stderr.flush()
