"""The hosts of a job: who they are, and which ranks or tasks each gets. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HOST = re.compile(r"(?:(?P<user>[A-Za-z0-9._-]+)@)?(?P<name>[A-Za-z0-9._-]+)(?::(?P<slots>\d+))?")
EXAMPLE = "host1:2,host2:2"


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: as ssh takes it.
        slots: how many processes of the job it may have.
        user: for ssh, "" for ssh's own choice.
    """

    name: str
    slots: int = 1
    user: str = ""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"host {self.name!r} has {self.slots} slots, expected 1 or more.")

    @property
    def target(self) -> str:
        """What ssh is given: "user@name"."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class Seat:
    """One process of the job on its host.

    Attributes:
        number: of the process in the job: its rank, or its task's number.
        host: index of its host.
        local: this process among those on the host; local_size: how many there are.
        cross: this host among those that have a process `local`; cross_size: how many have.
    """

    number: int
    host: int
    local: int
    local_size: int
    cross: int
    cross_size: int


def parse_hosts(text: str, where: str = "-H") -> tuple[Host, ...]:
    """Text such as "host1:2,user@host2:2", by default of `-H`; a host without a number has one slot.

    Raises:
        ValueError: a part is malformed, or a host is given twice.
    """
    return _distinct([_host(part.strip(), where) for part in text.split(",")], where)


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """The hosts in a file: a line each, "host1 slots=2" as Open MPI and Horovod write it, or "host1:2".

    Raises:
        ValueError: a line is malformed, a host is given twice, or there is none. It names file and line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "slots" or not value.isdecimal() or ":" in words[0]:
                raise ValueError(f"{where}: {word!r} after {words[0]!r}, expected slots=NUMBER.")
            host = Host(host.name, int(value), host.user)
        hosts.append(host)
    if not hosts:
        raise ValueError(f"{name} names no host, expected lines such as 'host1 slots=2'.")
    return _distinct(hosts, name)


def seats(hosts: Sequence[Host], count: int) -> tuple[Seat, ...]:
    """Processes 0 to `count` - 1 on the hosts' slots, host after host, as Horovod deals out ranks.

    Raises:
        ValueError: there are fewer slots.
    """
    slots = sum(host.slots for host in hosts)
    if not 1 <= count <= slots:
        told = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"{count} processes were asked for, and the hosts {told} have {slots} slots. Give a host "
            "more slots, or ask for fewer."
        )
    places = [(h, slot) for h, host in enumerate(hosts) for slot in range(host.slots)][:count]
    sizes = [sum(h == each for each, _ in places) for h in range(len(hosts))]
    found = []
    for number, (h, local) in enumerate(places):
        level = [each for each, slot in places if slot == local]
        found.append(Seat(number, h, local, sizes[h], level.index(h), len(level)))
    return tuple(found)


def horovod_env(seat: Seat, size: int, host: str, address: str, port: int, iface: str) -> dict[str, str]:
    """The variables by which Horovod finds its place in a ring of `size` ranks over Gloo.

    Args:
        seat: of the rank.
        size: number of ranks.
        host: what the rank's host is called, the same for all of its ranks.
        address, port: of the rendezvous.
        iface: the host's network interface for the ring.
    """
    return {
        "HOROVOD_RANK": str(seat.number),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(seat.local),
        "HOROVOD_LOCAL_SIZE": str(seat.local_size),
        "HOROVOD_CROSS_RANK": str(seat.cross),
        "HOROVOD_CROSS_SIZE": str(seat.cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": iface,
        "NCCL_SOCKET_IFNAME": iface,
    }


def _host(text: str, where: str) -> Host:
    found = HOST.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{where}: {text!r} is no host, expected a name or IPv4 address such as 'host1:2' or 'user@host1:2'."
        )
    return Host(found["name"], int(found["slots"] or 1), found["user"] or "")


def _distinct(hosts: list[Host], where: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where} names the host {name!r} twice; write it once, with all of its slots.")
    return tuple(hosts)
