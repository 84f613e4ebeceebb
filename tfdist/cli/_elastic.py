"""The options of `tfdist run` that make a job elastic, by the names that `horovodrun` gives them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from tfdist.cli._over_hosts import OverHosts
from tfdist.launch.discovery import Discovery, DiscoveryError
from tfdist.launch.elastic import Limits, team
from tfdist.launch.hosts import Host, total_slots
from tfdist.launch.installed import controller_problem
from tfdist.launch.links import is_here
from tfdist.launch.plan import Job, Program
from tfdist.launch.rounds import Rounds
from tfdist.launch.run import AnyJob
from tfdist.launch.run import dry_run as describe

WAIT_SECONDS = 600.0
OPTIONS = (
    click.option(
        "--min-np", type=click.IntRange(min=1),
        help="An elastic ring: ranks may die, hosts go and come; go on with no fewer ranks than these.",
    ),
    click.option("--max-np", type=click.IntRange(min=1), help="An elastic ring: the most ranks.  [default: all slots]"),
    click.option(
        "--host-discovery-script", type=click.Path(dir_okay=False, exists=True, executable=True),
        help="An elastic ring: a program that prints the hosts that there are now, as host1:2, one a line.",
    ),
    click.option(
        "--reset-limit", type=click.IntRange(min=0),
        help="An elastic ring: how often it may go on.  [default: any number]",
    ),
    click.option(
        "--elastic-timeout", type=click.FloatRange(min=1),
        help=f"An elastic ring: seconds to wait for enough hosts.  [default: {WAIT_SECONDS:g}]",
    ),
)  # fmt: skip


class Elastic:
    """What the options say.

    Attributes:
        limits: of the job.
        script: prints hosts; None for those of -H, or this machine.
    """

    def __init__(self, limits: Limits, script: str | None):
        self.limits, self.script = limits, script

    def discovery(self, over: OverHosts | None) -> Discovery:
        """Asks the script, or knows the hosts of the options.

        Raises:
            click.UsageError: neither says how many slots there are.
        """
        if self.script is not None and over is not None and over.hosts:
            raise click.UsageError("--host-discovery-script and -H or --hostfile exclude each other.")
        if self.script is not None:
            return Discovery(self.script)
        if over is not None:
            return Discovery(None, over.hosts)
        if self.limits.max_np == sys.maxsize:
            raise click.UsageError("--min-np on this machine needs --max-np, the number of ranks to have here.")
        return Discovery(None, (Host("localhost", self.limits.max_np),))


def elastic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it gets `elastic`, an `Elastic` or None."""
    names = ("min_np", "max_np", "host_discovery_script", "reset_limit", "elastic_timeout")

    @functools.wraps(command)
    def packed(*args: Any, **given: Any) -> Any:
        return command(*args, elastic=elastic_of(*(given.pop(name) for name in names)), **given)

    for option in reversed(OPTIONS):
        packed = option(packed)
    return packed


def elastic_of(
    low: int | None, high: int | None, script: str | None, resets: int | None, seconds: float | None
) -> Elastic | None:
    """What the options say together; None where none asks for an elastic job.

    Raises:
        click.UsageError: they contradict each other.
    """
    if low is None and high is None and script is None:
        for name, value in (("--reset-limit", resets), ("--elastic-timeout", seconds)):
            if value is not None:
                raise click.UsageError(
                    f"{name} is for elastic jobs: give --min-np, --max-np or --host-discovery-script."
                )
        return None
    try:
        limits = Limits(low or 1, high or sys.maxsize, resets, seconds or WAIT_SECONDS)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Elastic(limits, script)


def run_elastic(
    elastic: Elastic,
    over: OverHosts | None,
    what: Program,
    cores_per_rank: int | None,
    dry_run: bool,
    log_dir: str | None,
) -> int:
    """Run an elastic job; the exit code."""

    def job_on(hosts: Sequence[Host]) -> AnyJob:
        ranks = total_slots(hosts)
        if over is None or all(is_here(host) for host in hosts):  # a script of hosts has an `over` too
            return Job(what, ranks, "gloo", cores_per_rank)
        return over.job(what, tuple(hosts), (), ranks, cores_per_rank, 0)

    discovery = elastic.discovery(over)
    if dry_run:
        try:
            hosts = team(discovery.hosts(), (), elastic.limits)
        except DiscoveryError as error:
            raise click.ClickException(str(error)) from error
        text = describe(job_on(hosts)) if hosts else f"too few slots now for --min-np {elastic.limits.min_np}"
        click.echo(f"the first round, if it began now:\n{text}")
        return 0
    if over is None and (problem := controller_problem("gloo")):
        raise click.ClickException(problem)
    try:
        return Rounds(job_on, discovery, elastic.limits, log_dir).run()
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--log-dir") from error


def check_elastic(ranks: int | None, workers: int | None, ps: int | None, controller: str | None) -> None:
    """UsageError where the options of an elastic ring stand beside those of another job."""
    mpi = controller if controller == "mpi" else None
    for name, value in (("-np", ranks), ("--workers", workers), ("--ps", ps), ("--controller", mpi)):
        if value is not None:
            raise click.UsageError(
                f"{name} does not go with an elastic ring: it has --min-np to --max-np ranks, over Gloo."
            )
