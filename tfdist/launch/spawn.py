"""`spawn`: run a function on several ranks from a script or a notebook, results by rank."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

import tfdist.launch
from tfdist.cluster import World
from tfdist.launch import verdict
from tfdist.launch.installed import controller_problem
from tfdist.launch.outcome import Outcome
from tfdist.launch.plan import Job, Program, find_package_root, plan
from tfdist.launch.rundir import MARK, RunDir
from tfdist.launch.supervise import Supervisor

STACKS_BEFORE_DEADLINE = 2.0


class SpawnError(RuntimeError):
    """A rank failed. The message holds its traceback.

    Attributes:
        rank: the rank that failed first; None where no rank is to blame.
        exit_code: its exit code, 128 + n where signal n ended it.
        traceback: text of the rank's traceback, empty where there was no exception.
    """

    def __init__(self, message: str, rank: int | None, exit_code: int, traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback


class SpawnTimeoutError(SpawnError, TimeoutError):
    """Ranks had not ended at the deadline. The message holds their threads' stacks."""


def spawn(
    fn: Callable[..., Any],
    ranks: int = 2,
    *,
    args: Sequence[Any] = (),
    deadline: float | None = None,
    env: Mapping[str, str] | None = None,
    cores_per_rank: int | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `ranks` new processes that form one job; wait for all of them.

    The function, its arguments and its results travel by cloudpickle, so lambdas and functions of
    a notebook work; what `fn` prints is shown with its rank. No process is left behind.

    Args:
        fn: called once per rank. Import TensorFlow inside, or at the top of its module.
        ranks: number of processes; 1 needs no Horovod.
        args: positional arguments, the same for every rank.
        deadline: seconds after which everything is ended, None for never.
        env: variables added to the ranks' environment.
        cores_per_rank: bind each rank to that many cores.

    Returns:
        The results in rank order.

    Raises:
        SpawnError: a rank raised, was killed or left without a result.
        SpawnTimeoutError: the deadline passed.
        RuntimeError: called inside a rank, or Horovod is not there.
        ValueError: `ranks` is below 1.

    Example:
        >>> spawn(lambda base: base + tfdist.rank(), ranks=2, args=(10,))  # doctest: +SKIP
        [10, 11]
    """
    world = World.from_env()
    if world.size > 1:
        raise RuntimeError(
            f"spawn was called inside rank {world.rank} of {world.size} on {world.host}: every "
            "rank would start a job of its own. Call it from a process that no launcher started, "
            "or guard it by `if __name__ == '__main__'`."
        )
    if ranks > 1 and (problem := controller_problem("gloo")):
        raise RuntimeError(f"spawn with {ranks} ranks: {problem}")
    outcome, results = run_call(fn, ranks, args, deadline, env or {}, cores_per_rank)
    raise_failure(outcome, results, deadline)
    return [results[rank] for rank in range(ranks)]


def run_call(
    fn: Callable[..., Any],
    ranks: int,
    args: Sequence[Any],
    deadline: float | None,
    env: Mapping[str, str],
    cores_per_rank: int | None,
) -> tuple[Outcome, dict[int, Any]]:
    """Run the ranks; how that ended, and the results of those that gave one."""
    run_dir = RunDir.create(ranks)
    try:
        payload = run_dir.path / "call"
        ends_at = None if deadline is None else time.time() + deadline
        parts = (list(sys.path), ends_at, cloudpickle.dumps((fn, tuple(args))))
        payload.write_bytes(pickle.dumps(parts))
        job = Job(Program("call", str(payload)), ranks, "gloo", cores_per_rank)
        inherited = {**os.environ, **env}
        root = find_package_root(tfdist.launch.__file__.rpartition("launch")[0] + "cluster.py")
        process = plan(job, str(run_dir.path), sys.executable, inherited, root)
        outcome = Supervisor(run_dir, job.places, show, deadline).run(process, inherited)
        results = {}
        for rank in range(ranks):
            file = run_dir.path / f"result-{rank}"
            if file.exists():
                results[rank] = pickle.loads(file.read_bytes())
        return outcome, results
    finally:
        run_dir.remove()


def raise_failure(outcome: Outcome, results: Mapping[int, Any], deadline: float | None) -> None:
    """Raise what went wrong; returns where nothing did."""
    first = outcome.culprit
    if outcome.unfinished and (first is None or first.told):
        late = ", ".join(map(str, outcome.unfinished))
        stacks = "\n".join(f"stderr of rank {r}:\n{outcome.tails[r]}" for r in outcome.unfinished)
        raise SpawnTimeoutError(
            f"rank {late} had not ended after the deadline of {deadline:g} s and was ended.\n"
            f"{stacks}",
            outcome.unfinished[0],
            outcome.code,
        )
    if first is not None:
        text = verdict.report(outcome.failures)
        if not first.traceback and (tail := outcome.tails[first.rank]):
            text += f"\nLast lines on its stderr:\n{tail}"
        raise SpawnError(text, first.rank, first.code, first.traceback)
    if outcome.code:
        raise SpawnError(
            f"Horovod's launcher ended with exit code {outcome.code}:\n{outcome.launcher}",
            None,
            outcome.code,
        )
    missing = [rank for rank in range(len(outcome.tails)) if rank not in results]
    if missing:
        raise SpawnError(
            f"rank {missing[0]} ended with exit code 0 before the function returned: it left by "
            "os._exit or sys.exit(0), and gave no result.",
            missing[0],
            0,
        )


def show(stream: str, text: str) -> None:
    """Print on the current stdout or stderr, which a notebook or a test may have replaced."""
    target = sys.stdout if stream == "out" else sys.stderr
    target.write(text)
    target.flush()


def run_payload(payload: Path) -> None:
    """In a rank: run the stored function and store its result (program.py calls this)."""
    paths, ends_at, call = pickle.loads(payload.read_bytes())
    # The caller's modules must be found here too, as under multiprocessing.
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    if ends_at is not None:
        left = max(0.1, ends_at - time.time() - STACKS_BEFORE_DEADLINE)
        faulthandler.dump_traceback_later(left)
    fn, args = pickle.loads(call)
    result = fn(*args)
    rank = World.from_env().rank
    data = cloudpickle.dumps(result)
    target = Path(os.environ[MARK]) / f"result-{rank}"
    draft = target.with_suffix(".tmp")
    draft.write_bytes(data)
    draft.replace(target)
    faulthandler.cancel_dump_traceback_later()
