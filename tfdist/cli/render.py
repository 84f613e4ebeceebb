"""`tfdist render`: files for Docker Compose and Kubernetes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tfdist.render import compose as compose_file
from tfdist.render import k8s as manifest
from tfdist.render.wanted import Wanted

_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}

_OPTIONS = (
    click.option("--ring", type=click.IntRange(min=2), help="Ranks of a ring."),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        help="Instead of --ring: workers of a parameter-server job; it has a chief besides. With "
        "--ps 0 these are all tasks, and hold the stages of one model.",
    ),
    click.option(
        "--ps",
        type=click.IntRange(min=0),
        help="With --workers: number of parameter servers.  [default: 1]",
    ),
    click.option("--evaluator", is_flag=True, help="With --workers: an evaluator besides."),
    click.option(
        "--ssh",
        is_flag=True,
        help="With --ring: horovodrun starts the ranks over ssh. Else they find each other by TF_CONFIG.",
    ),
    click.option("--image", help="The image of every task.  [default: tfdist, with --ssh tfdist:ssh]"),
    click.option(
        "--gpus",
        type=click.IntRange(min=0),
        default=0,
        help="GPUs of each worker, with an --image that can use them.",
    ),
    click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`."),
    click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Write to this file, else to standard output.",
    ),
    click.argument("program"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
)


def _of_a_job(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command`, which takes (wanted, output, ...), the options that say what the job is."""

    @functools.wraps(command)
    def with_job(
        ring: int | None,
        workers: int | None,
        ps: int | None,
        evaluator: bool,
        ssh: bool,
        image: str | None,
        gpus: int,
        module: bool,
        output: Path | None,
        program: str,
        args: tuple[str, ...],
        **rest: Any,
    ) -> None:
        ranks = _workers(ring, workers, ps, evaluator, ssh)
        servers = 0 if workers is None else 1 if ps is None else ps
        words = ("python", *(("-m",) if module else ()), program, *args)
        try:
            command(Wanted(words, ranks, servers, evaluator, ssh, image, gpus), output, **rest)
        except ValueError as error:
            raise click.UsageError(str(error)) from None

    for option in reversed(_OPTIONS):
        option(with_job)
    return with_job


def _workers(
    ring: int | None, workers: int | None, ps: int | None, evaluator: bool, ssh: bool
) -> int:
    """The number of workers; UsageError unless the options choose one kind of job."""
    if workers is None:
        if ring is None:
            raise click.UsageError(
                "Missing option '--ring' (ranks of a ring) or '--workers' (workers of a "
                "parameter-server job)."
            )
        if ps is not None or evaluator:
            wrong = "--evaluator" if ps is None else "--ps"
            raise click.UsageError(f"{wrong} goes with --workers, not with --ring.")
        return ring
    if ring is not None or ssh:
        wrong = "--ssh" if ring is None else "--ring"
        raise click.UsageError(f"{wrong} and --workers exclude each other.")
    return workers


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


@click.group(context_settings=_SETTINGS)
def render() -> None:
    """Write a job as a file, for Docker Compose or Kubernetes.

    PROGRAM and its ARGS are what every task runs: `python PROGRAM ARGS` in the image's directory.
    Options stand before it.

    \b
    tfdist render compose --ring 2 train.py --epochs 3
    tfdist render compose --ps 1 --workers 2 -o compose.yml train.py
    tfdist render k8s --ring 4 --gpus 1 --image registry/mine:1 -o job.yml train.py
    """


@render.command(context_settings=_SETTINGS)
@_of_a_job
@click.option(
    "-v",
    "--volume",
    "volumes",
    multiple=True,
    help="What every task sees of this machine, as in `docker run`: ./data:/work/data. Again for more.",
)
def compose(wanted: Wanted, output: Path | None, volumes: tuple[str, ...]) -> None:
    """A file of Docker Compose that runs PROGRAM, one service a task."""
    _write(compose_file.render(wanted, volumes, str(output or "compose.yml")), output)


@render.command(context_settings=_SETTINGS)
@_of_a_job
@click.option("--name", default="tfdist", show_default=True, help="What the job is called.")
def k8s(wanted: Wanted, output: Path | None, name: str) -> None:
    """A manifest for Kubeflow that runs PROGRAM.

    It is a TFJob (kubeflow.org/v1) and with --ssh an MPIJob (kubeflow.org/v2beta1).
    """
    _write(manifest.render(wanted, name, str(output or "job.yml")), output)
