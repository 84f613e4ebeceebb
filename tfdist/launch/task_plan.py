"""The plan of a job of tasks on this machine: plain values, nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.launch.place import CHIEF, Place
from tfdist.launch.plan import Process, Program, check_cores, env_of_run, rank_arguments
from tfdist.tf_config import Cluster, Task, check_job

NO_RESTARTS = "a worker that is killed takes the weights on its devices with it"


@dataclass(frozen=True)
class TaskJob:
    """One run of a cluster's tasks, all on this machine, all with the same program.

    A worker or ps that is killed is started again, each up to `restarts` times.

    Raises:
        ValueError: a number out of range, restarts without a ps, or the cluster can run no job.
    """

    program: Program
    cluster: Cluster
    cores_per_rank: int | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        check_job(self.cluster)
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}, expected 0 or more.")
        if self.restarts and not self.cluster.ps:
            raise ValueError(f"restarts is {self.restarts}, expected 0 in a job without ps: {NO_RESTARTS}.")
        check_cores(self.cores_per_rank)

    @property
    def places(self) -> tuple[Place, ...]:
        """The tasks in the cluster's order: chief, ps, workers, evaluator; the first runs it."""
        return tuple(Place(number, task.name) for number, task in enumerate(self.cluster.tasks()))


def plan_tasks(
    job: TaskJob,
    run_dir: str,
    python: str,
    inherited: Mapping[str, str],
    package_root: str | None = None,
) -> Process:
    """The one process to start; it starts the tasks. Arguments as in `plan.plan`.

    It gets the cluster as the tasks do: by TF_CONFIG, the chief's.
    """
    arguments = rank_arguments(run_dir, job.program, job.cores_per_rank)
    argv = (python, "-m", "tfdist.launch.tasks", "--restarts", str(job.restarts), *arguments)
    env, unset = env_of_run(run_dir, inherited, package_root)
    env["TF_CONFIG"] = job.cluster.tf_config(job.cluster.tasks()[CHIEF])
    return Process(argv, env, unset)


def task_process(
    cluster: Cluster, task: Task, arguments: list[str], python: str, inherited: Mapping[str, str]
) -> Process:
    """The process that starts and watches one task's program.

    Args:
        cluster: all tasks.
        task: the one to start.
        arguments: those of rank.py that all tasks have in common.
        python: the interpreter.
        inherited: environment of the process that starts it.
    """
    place = Place(cluster.tasks().index(task), task.name)
    argv = (python, "-m", "tfdist.launch.rank", "--place", place.written(), *arguments)
    env = {"TF_CONFIG": cluster.tf_config(task)}
    # Without it a call to a task that has ended, or not started yet, waits instead of failing.
    if "GRPC_FAIL_FAST" not in inherited:
        env["GRPC_FAIL_FAST"] = "use_caller"
    return Process(argv, env)
