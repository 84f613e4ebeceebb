"""Where this process stands among the others: read from the environment, once, as one frozen value.

Launchers tell a process its place by environment variables, each launcher by its own. This module
is the only reader of them, so the rest of the package deals with a `World` and never with names of
variables. It imports neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from tfdist import slurm

# In the environment of an elastic job: the number of its round, and a name that no other job has.
ROUND, JOB = "TFDIST_ROUND", "TFDIST_JOB"

@dataclass(frozen=True)
class World:
    """The place of one process in a job of `size` equal processes (ranks).

    Attributes:
        rank: this process, 0 <= rank < size; rank 0 is the chief.
        size: number of processes of the job.
        local_rank: this process among those on the same host.
        local_size: number of processes on this host.
        host: name of this host, for messages.

    Raises:
        ValueError: the numbers contradict each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"World: size is {self.size}, expected 1 or more.")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"World: rank is {self.rank}, expected 0 <= rank < size={self.size}.")
        if not 1 <= self.local_size <= self.size:
            raise ValueError(
                f"World: local_size is {self.local_size}, expected 1 <= local_size <= "
                f"size={self.size}."
            )
        if not 0 <= self.local_rank < self.local_size:
            raise ValueError(
                f"World: local_rank is {self.local_rank}, expected 0 <= local_rank < "
                f"local_size={self.local_size}."
            )

    @property
    def is_chief(self) -> bool:
        """True on the one rank that prints and writes files."""
        return self.rank == 0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> World:
        """Read the launcher's variables; a process started by none is alone: `World(0, 1, 0, 1)`.

        The first family of `LAUNCHERS` that has one of its variables set decides. Ranks that no launcher of
        Horovod or MPI has started have met first (meeting.py), and then have Horovod's variables.

        Args:
            env: variables to read, `os.environ` by default.

        Raises:
            ValueError: a variable is missing, no number, or contradicts the others. The message
                names the variable, the value received and what was expected.
        """
        env = os.environ if env is None else env
        host = socket.gethostname()
        for launcher in LAUNCHERS:
            if (launcher.rank in env or launcher.size in env) and not _of_srun(launcher, env):
                return launcher.read(env, host)
        return cls(0, 1, 0, 1, host)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands on its host, and its host among the others, as Horovod counts.

    Attributes:
        local_rank, local_size: as in `World`.
        cross_rank, cross_size: this host among those that have a rank of this local rank.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def standings(hosts: Sequence[Hashable]) -> list[Standing]:
    """Of ranks 0, 1, ... on these hosts.

    >>> standings(["a", "b", "a"])[2]
    Standing(local_rank=1, local_size=2, cross_rank=0, cross_size=1)
    """
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, host in enumerate(hosts):
        level = [hosts[other] for other in range(len(hosts)) if local[other] == local[rank]]
        found.append(Standing(local[rank], hosts.count(host), level.index(host), len(level)))
    return found


def gloo_variables(
    rank: int, size: int, standing: Standing, host: str, address: str, port: int, iface: str
) -> dict[str, str]:
    """What Horovod's launcher would tell a rank of a ring over Gloo.

    Args:
        rank, size: as in `World`.
        standing: of the rank.
        host: what its host is called, the same for all ranks there.
        address, port: of the rendezvous.
        iface: the host's network interface for the ring.
    """
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(standing.local_rank),
        "HOROVOD_LOCAL_SIZE": str(standing.local_size),
        "HOROVOD_CROSS_RANK": str(standing.cross_rank),
        "HOROVOD_CROSS_SIZE": str(standing.cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": iface,
    }


def launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher of ranks has started this process, if only one."""
    return any(
        (each.rank in env or each.size in env) and not _of_srun(each, env) for each in LAUNCHERS
    )


@dataclass(frozen=True)
class Launcher:
    """The names under which one launcher passes a process its place."""

    title: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    @property
    def names(self) -> tuple[str, str, str, str]:
        """All four variables."""
        return (self.rank, self.size, self.local_rank, self.local_size)

    def read(self, env: Mapping[str, str], host: str) -> World:
        """The place that this launcher has written into `env`; ValueError as in `from_env`."""
        size = self._number(env, self.size, 1, None)
        rank = self._number(env, self.rank, 0, size)
        if self.local_rank not in env and self.local_size not in env:
            # Some process managers pass the global pair only. One host is the only reading under
            # which ranks on the same host never claim the same GPU.
            return World(rank, size, rank, size, host)
        local_size = self._number(env, self.local_size, 1, size + 1)
        local_rank = self._number(env, self.local_rank, 0, local_size)
        return World(rank, size, local_rank, local_size, host)

    def _number(self, env: Mapping[str, str], name: str, low: int, end: int | None) -> int:
        expected = f"an integer >= {low}" if end is None else f"an integer from {low} to {end - 1}"
        cause = (
            f"It is set by {self.title}: start the process through it, or unset "
            f"{', '.join(n for n in self.names if n in env)} to run alone."
        )
        text = env.get(name)
        if text is None:
            raise ValueError(f"{name} is not set, expected {expected}. {cause}")
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}, expected {expected}. {cause}") from None
        if value < low or (end is not None and value >= end):
            raise ValueError(f"{name} is {text!r}, expected {expected}. {cause}")
        return value


LAUNCHERS = (
    Launcher(
        "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# All variables by which a launcher tells a process its place.
PLACE_VARIABLES = frozenset(name for launcher in LAUNCHERS for name in launcher.names) | {slurm.STEP}


def _of_srun(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Whether Slurm's `srun` has set MPICH's variables beside its own: its tasks meet without MPI (meeting.py)."""
    return (
        launcher.rank == "PMI_RANK"
        and slurm.in_step(env)
        and env.get("PMI_RANK") == env.get(slurm.RANK)
        and env.get("PMI_SIZE") == env.get(slurm.SIZE)
    )
