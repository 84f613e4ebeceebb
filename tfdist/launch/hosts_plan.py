"""The plan of a job over several hosts: plain values, nothing is started."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster import gloo_variables
from tfdist.launch.hosts import Host, Seat, parse_hosts, seats
from tfdist.launch.place import Place
from tfdist.launch.plan import Process, Program, check_cores, env_of_run
from tfdist.launch.ssh import Ssh, connect_seconds
from tfdist.launch.task_plan import NO_RESTARTS
from tfdist.tf_config import Cluster, Task

START_SECONDS = 60.0


@dataclass(frozen=True)
class HostsJob:
    """One run over several hosts as the user asked for it.

    Attributes:
        program: what every process runs.
        hosts: in the order in which they are filled.
        tasks: their names in a job of tasks, chief first; () in a job of ranks.
        ranks: their number in a job of ranks.
        cores_per_rank, restarts: as in a job on one host.
        ssh: how hosts are reached.
        interfaces: names of network interfaces that may be used, () for any.
        start_seconds: for the whole start.

    Raises:
        ValueError: a number out of range, or more processes than slots.
    """

    program: Program
    hosts: tuple[Host, ...]
    tasks: tuple[str, ...] = ()
    ranks: int = 0
    cores_per_rank: int | None = None
    restarts: int = 0
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: tuple[str, ...] = ()
    start_seconds: float = START_SECONDS

    def __post_init__(self) -> None:
        check_cores(self.cores_per_rank)
        if self.restarts and not any(task.startswith("ps/") for task in self.tasks):
            raise ValueError(f"restarts is {self.restarts}, expected 0 in a job without ps: {NO_RESTARTS}.")
        seats(self.hosts, len(self.places))

    @property
    def places(self) -> tuple[Place, ...]:
        """The ranks or tasks."""
        if self.tasks:
            return tuple(Place(number, task) for number, task in enumerate(self.tasks))
        return tuple(Place(rank) for rank in range(self.ranks))

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Where each is."""
        return seats(self.hosts, len(self.places))

    @property
    def used(self) -> tuple[Host, ...]:
        """The hosts that get a process."""
        return tuple(host for h, host in enumerate(self.hosts) if any(seat.host == h for seat in self.seats))


def rank_envs(
    job: HostsJob, networks: Sequence[tuple[str, str]], address: str, port: int
) -> list[dict[str, str]]:
    """Each rank's own variables.

    Args:
        job: of ranks.
        networks: (interface, address) by host.
        address, port: of the rendezvous.
    """
    found = []
    for seat in job.seats:
        iface, name = networks[seat.host][0], job.hosts[seat.host].name
        env = gloo_variables(seat.number, job.ranks, seat, name, address, port, iface)
        found.append({**env, "NCCL_SOCKET_IFNAME": iface})
    return found


def task_envs(job: HostsJob, cluster: Cluster, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Each task's own variables; `inherited` is what all get from the launching process."""
    more = {} if "GRPC_FAIL_FAST" in inherited else {"GRPC_FAIL_FAST": "use_caller"}
    found = []
    for name in job.tasks:
        found.append({"TF_CONFIG": cluster.tf_config(Task.parse(name)), **more})
    return found


def seated_arguments(job: HostsJob, seat: Seat) -> list[str]:
    """Arguments of rank.py for one process, without those that all have."""
    words = [] if job.cores_per_rank is None else ["--cores-per-rank", str(job.cores_per_rank)]
    if job.tasks:
        words += ["--place", job.places[seat.number].written(), "--local-rank", str(seat.local_rank)]
        words += ["--restarts", str(job.restarts)]
    return words


def plan_hosts(
    job: HostsJob,
    run_dir: str,
    python: str,
    inherited: Mapping[str, str],
    package_root: str | None = None,
    terminal: tuple[list[str], bytes] | None = None,
) -> Process:
    """The one process to start on this machine; it starts the others. Arguments as in `plan.plan`.

    `terminal` is the answer of `terminal_here`: rank 0 or the chief gets one like it on its host.
    """
    hosts = ",".join(f"{host.target}:{host.slots}" for host in job.hosts)
    argv = [python, "-m", "tfdist.launch.spread", "--hosts", hosts]
    argv += ["--tasks", ",".join(job.tasks)] if job.tasks else ["--ranks", str(job.ranks)]
    for name, value in (
        ("--cores-per-rank", job.cores_per_rank),
        ("--restarts", job.restarts or None),
        ("--ssh-port", job.ssh.port),
        ("--ssh-identity-file", job.ssh.identity_file),
        ("--network-interfaces", ",".join(job.interfaces) or None),
        ("--start-timeout", f"{job.start_seconds:g}"),
        ("--terminal", terminal and f"{terminal[1].hex()}:{','.join(terminal[0])}"),
    ):
        if value is not None:
            argv += [name, str(value)]
    env, unset = env_of_run(run_dir, inherited, package_root)
    return Process((*argv, run_dir, job.program.kind, job.program.target, *job.program.args), env, unset)


def parse(words: Sequence[str]) -> tuple[HostsJob, str, str]:
    """The job, the run's directory and rank 0's terminal from a command line of `plan_hosts`."""
    parser = argparse.ArgumentParser(prog="python -m tfdist.launch.spread")
    parser.add_argument("--hosts", type=parse_hosts, required=True)
    parser.add_argument("--tasks", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--cores-per-rank", type=int)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--ssh-port", type=int)
    parser.add_argument("--ssh-identity-file")
    parser.add_argument("--network-interfaces", type=lambda text: tuple(text.split(",")), default=())
    parser.add_argument("--start-timeout", type=float, required=True)
    parser.add_argument("--terminal", default="")
    parser.add_argument("run_dir")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    kind, target, *args = given.program
    job = HostsJob(
        Program(kind, target, tuple(args)),
        given.hosts,
        given.tasks,
        given.ranks,
        given.cores_per_rank,
        given.restarts,
        Ssh(given.ssh_port, given.ssh_identity_file, connect_seconds(given.start_timeout)),
        given.network_interfaces,
        given.start_timeout,
    )
    return job, given.run_dir, given.terminal
