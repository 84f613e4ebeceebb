"""Where ranks meet that no Horovod launcher has started: read from the environment as one value. Pure.

Two ways to start the same command on several machines tell each process who the others are, and
nothing of Horovod: a TF_CONFIG of workers (TensorFlow's multi-worker form, Kubeflow's TFJob) and
Slurm's `srun`. From either comes a `Meeting`: the rank of this process and the address at which
rank 0 lets all of them find each other (`comm/rendezvous.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tfdist import slurm, tf_config
from tfdist.cluster import World, launched
from tfdist.tf_config import LOOPBACK, Cluster, Task, host_and_port

ADDRESS = "TFDIST_RENDEZVOUS"  # "host:port" in place of the one that is computed


@dataclass(frozen=True)
class Meeting:
    """One rank, and where it meets the others.

    Attributes:
        rank, size, local_rank, local_size: as in `World`.
        cross_rank, cross_size: this host among those that have a rank of this local rank.
        host: name of this rank's host, the same for all of its ranks.
        address: "host:port" of rank 0.
        names: what each rank is called by whoever started it: "worker/1", "task 1".
        origin: who that is, for messages.
        common: what all ranks must have been told alike, as text.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    address: str
    names: tuple[str, ...]
    origin: str
    common: str

    def environment(self) -> dict[str, str]:
        """The place of this rank as Horovod's launcher would tell it."""
        return {
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
            "HOROVOD_HOSTNAME": self.host,
        }

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
    before = [hosts[:r].count(host) for r, host in enumerate(hosts)]
    level = [hosts[r] for r in range(len(ranks)) if before[r] == before[rank]]
    return Meeting(
        rank=rank,
        size=len(ranks),
        local_rank=before[rank],
        local_size=hosts.count(hosts[rank]),
        cross_rank=level.index(hosts[rank]),
        cross_size=len(level),
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
    level = [node for node, count in enumerate(step.counts) if count > step.local_rank]
    return Meeting(
        rank=step.rank,
        size=step.size,
        local_rank=step.local_rank,
        local_size=step.counts[step.node],
        cross_rank=level.index(step.node),
        cross_size=len(level),
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
