"""Where ranks meet that no Horovod launcher has started: read from the environment as one value. Pure.

Two ways to start the same command on several machines tell each process who the others are, and
nothing of Horovod: a TF_CONFIG of workers (TensorFlow's multi-worker form, Kubeflow's TFJob) and
Slurm's `srun`. From either comes a `Meeting`: the rank of this process and the address at which
rank 0 lets all of them find each other (`comm/rendezvous.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tfdist import slurm, tf_config
from tfdist.cluster import Standing, World, launched, standings
from tfdist.tf_config import LOOPBACK, Cluster, Task, host_and_port

ADDRESS = "TFDIST_RENDEZVOUS"  # "host:port" in place of the one that is computed


@dataclass(frozen=True)
class Meeting(Standing):
    """One rank, and where it meets the others.

    Attributes:
        rank, size: as in `World`.
        host: name of this rank's host, the same for all of its ranks.
        address: "host:port" of rank 0.
        names: what each rank is called by whoever started it: "worker/1", "task 1".
        origin: who that is, for messages.
        common: what all ranks must have been told alike, as text.
    """

    rank: int
    size: int
    host: str
    address: str
    names: tuple[str, ...]
    origin: str
    common: str

    @property
    def me(self) -> str:
        """This rank for messages: "rank 1 (worker/1 of TF_CONFIG)"."""
        return f"rank {self.rank} ({self.names[self.rank]} of {self.origin})"


def from_env(env: Mapping[str, str] | None = None) -> Meeting | None:
    """The meeting that the environment asks for, None where it asks for none.

    A launcher's rank variables for more than one rank come first: those ranks have met. Then TF_CONFIG
    decides where it names a cluster, and at last Slurm.

    Raises:
        ValueError: TF_CONFIG, Slurm's variables or TFDIST_RENDEZVOUS are wrong.
    """
    env = os.environ if env is None else env
    if World.from_env(env).size > 1:
        return None
    found = tf_config.from_env(env)
    # In an allocation of Slurm's a launcher may have started this process alone.
    step = None if found is not None or launched(env) else slurm.read(env)
    meeting = of_cluster(*found) if found is not None else of_step(step)
    if meeting is None or ADDRESS not in env:
        return meeting
    host, _, port = env[ADDRESS].rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(
            f'{ADDRESS} is {env[ADDRESS]!r}, expected "host:port", where rank 0 can be reached by all ranks.'
        )
    return replace(meeting, address=env[ADDRESS])


def watches(env: Mapping[str, str] | None = None) -> bool:
    """Whether TF_CONFIG names this process the evaluator of a ring.

    Raises:
        ValueError: as `from_env`.
    """
    env = os.environ if env is None else env
    found = tf_config.from_env(env) if World.from_env(env).size == 1 else None
    return found is not None and found[1].job == "evaluator" and not found[0].ps


def of_cluster(cluster: Cluster, task: Task) -> Meeting | None:
    """The ring of a cluster without ps: the chief, if there is one, and the workers, in this order.

    None for a cluster with ps, for one task alone, and for an evaluator, which is no rank.
    """
    ranks = ring_tasks(cluster)
    if cluster.ps or len(ranks) < 2 or task not in ranks:
        return None
    hosts = [_host(cluster.address(each)) for each in ranks]
    rank = ranks.index(task)
    return Meeting(
        **asdict(standings(hosts)[rank]),
        rank=rank,
        size=len(ranks),
        host=hosts[rank],
        address=cluster.address(ranks[0]),
        names=tuple(each.name for each in ranks),
        origin="TF_CONFIG",
        common=", ".join(f"{each.name} {cluster.address(each)}" for each in ranks),
    )


def ring_tasks(cluster: Cluster) -> list[Task]:
    """The tasks that are ranks, in their order."""
    return [task for task in cluster.tasks() if task.job in ("chief", "worker")]


def of_step(step: slurm.Step | None) -> Meeting | None:
    """The ring of the tasks of a Slurm step; None without one, or for one task alone."""
    if step is None or step.size < 2:
        return None
    # Whatever the order in which Slurm deals out ranks, those of a node have their local ranks in order.
    by_node = standings([node for node, count in enumerate(step.counts) for _ in range(count)])
    return Meeting(
        **asdict(by_node[sum(step.counts[: step.node]) + step.local_rank]),
        rank=step.rank,
        size=step.size,
        host=step.nodes[step.node],
        address=f"{step.nodes[0]}:{step.port}",
        names=tuple(f"task {rank}" for rank in range(step.size)),
        origin="Slurm",
        common=", ".join(f"{node} x {count}" for node, count in zip(step.nodes, step.counts, strict=True)),
    )


def _host(address: str) -> str:
    """A host's name to compare; loopback names are one host."""
    host = host_and_port(address)[0].lower()
    return LOOPBACK if host == LOOPBACK or host == "::1" or host.startswith("127.") else host
