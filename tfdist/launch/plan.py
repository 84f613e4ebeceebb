"""From what the user asked for to the processes that do it: plain values, nothing is started."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.cluster import PLACE_VARIABLES
from tfdist.launch.place import Place
from tfdist.launch.rundir import MARK

CONTROLLERS = ("gloo", "mpi")

# TensorFlow runs ready operations out of order on one inter-op thread: the second one lets a
# bucket be handed to the ring while the backward pass goes on, even where a rank has one core.
MIN_INTER_OP_THREADS = 2


@dataclass(frozen=True)
class Program:
    """What every process of the job runs.

    Attributes:
        kind: "script" (target is a path), "module" (a dotted name) or "call" (the path of a
            pickled function, see spawn.py).
        target: see kind.
        args: the program's own arguments.
    """

    kind: str
    target: str
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("script", "module", "call"):
            raise ValueError(
                f"Program: kind is {self.kind!r}, expected 'script', 'module' or 'call'."
            )


@dataclass(frozen=True)
class Job:
    """One run of ranks as the user asked for it; task_plan.py has that of a cluster's tasks.

    Raises:
        ValueError: a number out of range or an unknown controller.
    """

    program: Program
    ranks: int
    controller: str = "gloo"
    cores_per_rank: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"the number of ranks is {self.ranks}, expected 1 or more.")
        if self.controller not in CONTROLLERS:
            known = ", ".join(CONTROLLERS)
            raise ValueError(f"unknown controller {self.controller!r}, expected one of: {known}.")
        check_cores(self.cores_per_rank)

    @property
    def places(self) -> tuple[Place, ...]:
        """The ranks."""
        return tuple(Place(rank) for rank in range(self.ranks))


def check_cores(cores_per_rank: int | None) -> None:
    """ValueError unless it is None, or 1 or more."""
    if cores_per_rank is not None and cores_per_rank < 1:
        raise ValueError(f"cores per rank is {cores_per_rank}, expected 1 or more.")


@dataclass(frozen=True)
class Process:
    """A process to start: its command line, and what changes in the environment it inherits.

    `env` are variables to set, `unset` names to take out.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment to start it with."""
        kept = {name: value for name, value in inherited.items() if name not in self.unset}
        return {**kept, **self.env}

    def shell(self) -> str:
        """The process as a line for a shell, for `--dry-run` and for messages."""
        unset = [word for name in sorted(self.unset) for word in ("-u", name)]
        env = [f"{name}={value}" for name, value in sorted(self.env.items())]
        prefix = ["env", *unset, *env] if unset or env else []
        return shlex.join([*prefix, *self.argv])


def plan(
    job: Job,
    run_dir: str,
    python: str,
    inherited: Mapping[str, str],
    package_root: str | None = None,
) -> Process:
    """The one process to start; it starts the ranks: Horovod's launcher, or the rank alone.

    Args:
        job: what the user asked for.
        run_dir: directory of the run (rundir.py).
        python: the interpreter.
        inherited: environment of the process that starts it.
        package_root: directory that holds the package `tfdist`, put on the ranks' PYTHONPATH; None
            where it is installed and found anyway.
    """
    arguments = rank_arguments(run_dir, job.program, job.cores_per_rank)
    rank = [python, "-m", "tfdist.launch.rank", *arguments]
    env, unset = env_of_run(run_dir, inherited, package_root)
    if job.ranks == 1:
        return Process(tuple(rank), env, unset)
    ring = [python, "-m", "tfdist.launch.horovodrun", f"--{job.controller}"]
    ring += ["-np", str(job.ranks), "-H", f"localhost:{job.ranks}", "--disable-cache"]
    return Process((*ring, *rank), env, unset)


def rank_arguments(run_dir: str, program: Program, cores_per_rank: int | None) -> list[str]:
    """The arguments of rank.py that all processes of the job have in common."""
    cores = [] if cores_per_rank is None else ["--cores-per-rank", str(cores_per_rank)]
    return [*cores, run_dir, program.kind, program.target, *program.args]


def env_of_run(
    run_dir: str, inherited: Mapping[str, str], package_root: str | None
) -> tuple[dict[str, str], frozenset[str]]:
    """What all processes of a run have in their environment, and what none of them has."""
    env = {MARK: run_dir}
    if package_root is not None:
        known = [entry for entry in inherited.get("PYTHONPATH", "").split(":") if entry]
        if package_root not in known:
            env["PYTHONPATH"] = ":".join([*known, package_root])
    # A run started from inside another's rank must not take that rank's place for its own.
    return env, PLACE_VARIABLES & set(inherited)


def program_argv(python: str, place: Place, program: Sequence[str]) -> list[str]:
    """The command line of the program's own process, below rank.py."""
    return [python, "-m", "tfdist.launch.program", place.written(), *program]


def rank_cores(available: Sequence[int], local_rank: int, cores_per_rank: int) -> list[int]:
    """The cores of one rank, counted round where there are fewer than the ranks want.

    >>> rank_cores([0, 1, 2, 3], local_rank=1, cores_per_rank=2)
    [2, 3]
    >>> rank_cores([0, 1], local_rank=2, cores_per_rank=1)
    [0]
    """
    first = local_rank * cores_per_rank
    return sorted({available[(first + i) % len(available)] for i in range(cores_per_rank)})


def rank_env(inherited: Mapping[str, str], rank: int, cores_per_rank: int | None) -> dict[str, str]:
    """Environment of the program of `rank`, or of the task with that number among the places.

    What the user has set is left as it is.
    """
    env = dict(inherited)
    if rank > 0:
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # start-up notes: once is enough
    if cores_per_rank is not None:
        env.setdefault("OMP_NUM_THREADS", str(cores_per_rank))
        env.setdefault("TF_NUM_INTRAOP_THREADS", str(cores_per_rank))
        inter_op = max(MIN_INTER_OP_THREADS, cores_per_rank)
        env.setdefault("TF_NUM_INTEROP_THREADS", str(inter_op))
    return env


def core_warning(places: Sequence[Place], cores_per_rank: int | None, cores: int) -> str | None:
    """One line where the processes want more cores than there are, else None."""
    if len(places) * (cores_per_rank or 1) <= cores:
        return None
    kind = "tasks" if places[0].task else "ranks"
    each = f" x {cores_per_rank} cores" if cores_per_rank else ""
    have = f"{cores} core{'s' * (cores != 1)}"
    return f"{len(places)} {kind}{each} share {have}: they will slow each other."


def find_package_root(package_file: str) -> str | None:
    """Directory to put on PYTHONPATH so that the package is found; None for an installed one."""
    root = Path(package_file).resolve().parent.parent
    return None if root.name in ("site-packages", "dist-packages") else str(root)
