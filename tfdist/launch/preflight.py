"""What must be right on all hosts before anything is started. Pure: facts in, problems out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.launch.hosts import Host
from tfdist.launch.hosts_plan import HostsJob

# Distributions that have to be of one version everywhere. TensorFlow has several names.
COMPARED = ("tfdist", "tensorflow", "keras", "horovod")


@dataclass(frozen=True)
class Facts:
    """What an agent says of its host.

    Attributes:
        python: version, as "3.11.7".
        versions: of `COMPARED`, "" for what is not there.
        controllers: of its Horovod, None where there is none.
        addresses: (interface, IPv4 address) of those that are not loopback, the best first.
        program: whether the program's file is there; True for a module.
        cores: that a process may use.
    """

    python: str
    versions: Mapping[str, str]
    controllers: tuple[str, ...] | None
    addresses: tuple[tuple[str, str], ...]
    program: bool
    cores: int = field(default=1)


def differences(hosts: Sequence[Host], facts: Sequence[Facts], program: str, ring: bool) -> list[str]:
    """What is wrong with the hosts' environments, a line each, with the host and the remedy.

    Args:
        hosts: of the job.
        facts: of each.
        program: the file to run.
        ring: whether the job needs Horovod.
    """
    lines = []
    first = facts[0]
    for host, own in zip(hosts, facts, strict=True):
        if not own.program:
            lines.append(f"{host.name} has no file {program}: copy it there, or use a shared file system.")
        if ring and own.controllers is None:
            lines.append(f"{host.name} has no Horovod that tfdist has built: run `tfdist build-horovod` there.")
        elif ring and "gloo" not in (own.controllers or ()):
            lines.append(f"{host.name} has a Horovod without Gloo: run `tfdist build-horovod` there.")
        pairs = [("Python", own.python, first.python)]
        for name in COMPARED:
            if name != "horovod" or ring:
                pairs.append((name, own.versions.get(name, ""), first.versions.get(name, "")))
        for name, mine, theirs in pairs:
            if mine != theirs:
                lines.append(
                    f"{host.name} has {name} {mine or '(none)'}, and {hosts[0].name} {theirs or '(none)'}: "
                    "install the same version on all hosts."
                )
    return lines


def crowded(hosts: Sequence[Host], facts: Sequence[Facts], job: HostsJob) -> list[str]:
    """A line for each host whose processes want more cores than it has."""
    lines = []
    for index, (host, own) in enumerate(zip(hosts, facts, strict=True)):
        count = sum(seat.host == index for seat in job.seats)
        each = f" x {job.cores_per_rank} cores" if job.cores_per_rank else ""
        if count * (job.cores_per_rank or 1) > own.cores:
            have = f"{own.cores} core{'s' * (own.cores != 1)}"
            who = f"{count} process{'es' * (count > 1)}{each}"
            lines.append(f"{who} share {have} of {host.name}: they will slow each other.")
    return lines


def candidates(
    hosts: Sequence[Host], facts: Sequence[Facts], interfaces: Sequence[str]
) -> tuple[list[list[tuple[str, str]]], list[str]]:
    """Each host's addresses that may carry the job, and what is wrong.

    Args:
        hosts: of the job.
        facts: of each.
        interfaces: those that the user allows, () for any.
    """
    found, lines = [], []
    for host, own in zip(hosts, facts, strict=True):
        allowed = [pair for pair in own.addresses if not interfaces or pair[0] in interfaces]
        found.append(allowed)
        if not allowed:
            have = ", ".join(f"{name} ({address})" for name, address in own.addresses) or "none"
            asked = f"of the interfaces {', '.join(interfaces)} none" if interfaces else "no network interface"
            lines.append(f"{host.name} has {asked} with an IPv4 address; it has {have}.")
    return found, lines


def common_network(
    hosts: Sequence[Host],
    offered: Sequence[Sequence[tuple[str, str]]],
    reached: Sequence[set[tuple[int, str]]],
) -> tuple[list[tuple[str, str]], list[str]]:
    """For each host the interface and address by which all others reach it, and what is wrong.

    Args:
        hosts: of the job.
        offered: each host's addresses, the best first.
        reached: for each host the (index, address) of others that it could connect to.
    """
    chosen, lines = [], []
    for h, host in enumerate(hosts):
        others = [o for o in range(len(hosts)) if o != h]
        shared = [pair for pair in offered[h] if all((h, pair[1]) in reached[o] for o in others)]
        if shared:
            chosen.append(shared[0])
            continue
        chosen.append(("", ""))
        addresses = ", ".join(f"{address} ({name})" for name, address in offered[h])
        deaf = [hosts[o].name for o in others if not any(at == h for at, _ in reached[o])]
        if deaf:
            lines.append(
                f"{', '.join(deaf)} cannot connect to {host.name} at any of {addresses}: see that they share a "
                "network, and that no firewall is between them (any port above 1023)."
            )
        else:
            lines.append(
                f"{host.name} has no one address that all other hosts reach (it has {addresses}): choose a "
                "network that all of them share by --network-interfaces."
            )
    return chosen, lines
