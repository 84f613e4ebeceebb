"""`tfdist run`: train on several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tfdist.launch.installed import controller_problem
from tfdist.launch.plan import CONTROLLERS, Job, Program
from tfdist.launch.run import dry_run as describe
from tfdist.launch.run import run as run_job


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option(
    "-np", "--ranks", required=True, type=click.IntRange(min=1), help="Number of processes."
)
@click.option(
    "--controller",
    type=click.Choice(CONTROLLERS),
    default="gloo",
    show_default=True,
    help="How the ranks find each other and exchange data.",
)
@click.option(
    "--cores-per-rank",
    type=click.IntRange(min=1),
    help="Bind each rank to cores of its own, and set its thread counts.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option("--dry-run", is_flag=True, help="Print the command and environment, start nothing.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int,
    controller: str,
    cores_per_rank: int | None,
    module: bool,
    dry_run: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM with its ARGS on several ranks of this machine.

    Rank 0 prints as usual, the lines of the others carry their rank. When a rank fails the rest is
    ended, its traceback is shown last, and its exit code is that of this command. Options for this
    command stand before PROGRAM.

    \b
    tfdist run -np 2 train.py --epochs 3
    tfdist run -np 4 --cores-per-rank 1 -m mypackage.train
    """
    if not module and not Path(program).exists():
        raise click.BadParameter(
            f"there is no file {program!r}; to run a module write -m {program}.",
            param_hint="PROGRAM",
        )
    job = Job(
        Program("module" if module else "script", program, args), ranks, controller, cores_per_rank
    )
    if dry_run:
        click.echo(describe(job))
        return
    if ranks > 1 and (problem := controller_problem(controller)):
        raise click.ClickException(problem)
    sys.exit(run_job(job))
