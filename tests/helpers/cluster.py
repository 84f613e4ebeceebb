"""Runs a function on several ranks for a test, with a deadline and the ranks' own tracebacks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tfdist.launch.installed import built_controllers
from tfdist.launch.spawn import raise_failure, run_call

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or "mpi" not in (built_controllers() or ()),
    reason="needs mpirun and a Horovod built with MPI",
)


def run(
    fn: Callable[..., Any],
    ranks: int = 2,
    deadline: float = 120,
    env: Mapping[str, str] | None = None,
    args: Sequence[Any] = (),
) -> list[Any]:
    """Run `fn(*args)` on `ranks` ranks; their results in rank order.

    `fn` may be a closure. With one rank it runs in a new process without Horovod.

    Raises:
        SpawnError: a rank failed; the message holds its traceback.
        SpawnTimeoutError: not done after `deadline` seconds; the message holds the stacks.
        AssertionError: the ranks were fine but left processes behind.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    cores_per_rank = 1 if ranks > 1 and cores >= ranks else None
    everything = {**QUIET, **(env or {})}
    outcome, results = run_call(fn, ranks, args, deadline, everything, cores_per_rank)
    raise_failure(outcome, results, deadline)
    if outcome.leaked:
        raise AssertionError(f"processes were left behind: {outcome.leaked}")
    return [results[rank] for rank in range(ranks)]
