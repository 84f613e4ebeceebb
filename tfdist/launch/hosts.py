"""The hosts of a job: who they are, and which ranks or tasks each gets. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tfdist.cluster import Standing, standings

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
class Seat(Standing):
    """One process of the job on its host.

    Attributes:
        number: of the process in the job: its rank, or its task's number.
        host: index of its host.
    """

    number: int
    host: int


def total_slots(hosts: Sequence[Host]) -> int:
    """Of all hosts together."""
    return sum(host.slots for host in hosts)


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
    slots = total_slots(hosts)
    if not 1 <= count <= slots:
        told = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ValueError(
            f"{count} processes were asked for, and the hosts {told} have {slots} slots. Give a host "
            "more slots, or ask for fewer."
        )
    taken = [h for h, host in enumerate(hosts) for _ in range(host.slots)][:count]
    return tuple(
        Seat(**asdict(standing), number=number, host=h)
        for number, (h, standing) in enumerate(zip(taken, standings(taken), strict=True))
    )


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
