"""The options of `tfdist run` that are for several hosts, by the names that `horovodrun` gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tfdist.launch.hosts import Host, parse_hostfile, parse_hosts
from tfdist.launch.hosts_plan import START_SECONDS, HostsJob
from tfdist.launch.links import is_here
from tfdist.launch.plan import Program
from tfdist.launch.ssh import Ssh, connect_seconds

OPTIONS = (
    click.option(
        "-H", "--hosts", metavar="HOST:SLOTS,...",
        help="Run on these hosts, by ssh: host1:2,user@host2:2.",
    ),
    click.option(
        "--hostfile", type=click.Path(dir_okay=False),
        help="A file with a host a line, as `host1 slots=2`, in place of -H.",
    ),
    click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="With hosts: ssh's port."),
    click.option(
        "-i", "--ssh-identity-file", type=click.Path(dir_okay=False, exists=True),
        help="With hosts: the private key for ssh.",
    ),
    click.option(
        "--network-interfaces", metavar="NAME,...",
        help="With hosts: the network interfaces that may carry the job; names may differ by host.",
    ),
    click.option(
        "--start-timeout", type=click.FloatRange(min=1),
        help=f"With hosts: seconds for the whole start.  [default: {START_SECONDS:g}]",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class OverHosts:
    """What the options say.

    Attributes:
        hosts: in order.
        ssh, interfaces, start_seconds: as in `HostsJob`.
    """

    hosts: tuple[Host, ...]
    ssh: Ssh
    interfaces: tuple[str, ...]
    start_seconds: float

    def job(
        self,
        what: Program,
        hosts: tuple[Host, ...],
        tasks: tuple[str, ...],
        ranks: int,
        cores_per_rank: int | None,
        restarts: int,
    ) -> HostsJob:
        """A job on these hosts, reached as the options say."""
        return HostsJob(
            what, hosts, tasks, ranks, cores_per_rank, restarts, self.ssh, self.interfaces, self.start_seconds
        )

    @property
    def here(self) -> bool:
        """Whether this machine is the only one."""
        return all(is_here(host) for host in self.hosts)


def hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it gets `over`, an `OverHosts` or None."""

    @functools.wraps(command)
    def packed(*args: Any, **given: Any) -> Any:
        names = ("hosts", "hostfile", "ssh_port", "ssh_identity_file", "network_interfaces", "start_timeout")
        # A script that prints hosts takes the place of -H.
        scripted = given.get("host_discovery_script") is not None
        hosts, hostfile, port, identity_file, interfaces, seconds = (given.pop(name) for name in names)
        over = over_hosts(hosts, hostfile, port, identity_file, interfaces, seconds, scripted)
        return command(*args, over=over, **given)

    for option in reversed(OPTIONS):
        packed = option(packed)
    return packed


def over_hosts(
    hosts: str | None,
    hostfile: str | None,
    port: int | None,
    identity_file: str | None,
    interfaces: str | None,
    seconds: float | None,
    scripted: bool,
) -> OverHosts | None:
    """What the options say together; None where they name no hosts, and no script does.

    Raises:
        click.UsageError: they contradict each other, or hosts are malformed.
    """
    if hosts is None and hostfile is None and not scripted:
        for name, value in (
            ("--ssh-port", port),
            ("--ssh-identity-file", identity_file),
            ("--network-interfaces", interfaces),
            ("--start-timeout", seconds),
        ):
            if value is not None:
                raise click.UsageError(f"{name} needs the hosts: -H host1:2,host2:2 or --hostfile.")
        return None
    if hosts is not None and hostfile is not None:
        raise click.UsageError("-H and --hostfile exclude each other.")
    named: tuple[Host, ...] = ()
    try:
        if hosts is not None:
            named = parse_hosts(hosts)
        elif hostfile is not None:
            named = parse_hostfile(Path(str(hostfile)).read_text(), str(hostfile))
    except OSError as error:
        raise click.UsageError(f"--hostfile {hostfile}: {error.strerror or error}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    total = START_SECONDS if seconds is None else seconds
    names = tuple(name.strip() for name in (interfaces or "").split(",") if name.strip())
    return OverHosts(named, Ssh(port, identity_file, connect_seconds(total)), names, total)
