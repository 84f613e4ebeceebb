"""The tasks of a job that is to be started, and their cluster once they have addresses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.tf_config import Cluster


def task_names(ps: int, workers: int, evaluator: bool = False) -> tuple[str, ...]:
    """Of a job with so many tasks, in the order of `Cluster.tasks`; without ps there are workers alone."""
    names = ["chief/0"] if ps else []
    names += [f"ps/{i}" for i in range(ps)] + [f"worker/{i}" for i in range(workers)]
    return tuple([*names, "evaluator/0"] if evaluator else names)


def cluster_of(tasks: Sequence[str], addresses: Sequence[str]) -> Cluster:
    """The cluster of tasks with these "host:port"s."""
    by_job: dict[str, list[str]] = {}
    for name, address in zip(tasks, addresses, strict=True):
        by_job.setdefault(name.split("/")[0], []).append(address)
    chief = by_job.get("chief")
    return Cluster(
        chief[0] if chief else None,
        tuple(by_job.get("worker", ())),
        tuple(by_job.get("ps", ())),
        tuple(by_job.get("evaluator", ())),
    )
