"""`tfdist build-horovod`: the verb around `tfdist.build.job`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tfdist.build import job
from tfdist.build.errors import BuildError


class ConsoleProgress:
    """Steps as a spinner with the time they have taken; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show `title` while the step runs, then what it took."""
        start = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as bar:
                bar.add_task(title, total=None)
                yield
        else:
            self.note(f"{title} ...")
            yield
        self.note(f"{title}: {time.monotonic() - start:.0f} s")

    def note(self, text: str) -> None:
        """Print a line as it is: paths in it are to be copied."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@click.command("build-horovod")
@click.option("--gpu", is_flag=True, help="For GPUs, with NCCL; needs nvcc of TensorFlow's CUDA.")
@click.option("--without-mpi", is_flag=True, help="Gloo alone, even where mpicc is on PATH.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Compiler processes at a time.  [default: a core each, as far as the memory reaches]",
)
@click.option(
    "--sdist",
    type=click.Path(path_type=Path),
    help="Horovod's sdist from PyPI, where there is no network.",
)
@click.option("--rebuild", is_flag=True, help="Compile and install even if it was done before.")
def build_horovod(
    gpu: bool, without_mpi: bool, jobs: int | None, sdist: Path | None, rebuild: bool
) -> None:
    """Build Horovod for the TensorFlow installed here, install it, and check it.

    PyPI's Horovod does not compile against current TensorFlow; this takes its source, applies
    tfdist's patch, and keeps the wheel in ~/.cache/tfdist (or TFDIST_CACHE) for the next time.
    """
    progress = ConsoleProgress(Console())
    options = job.Options(
        without_mpi=without_mpi,
        jobs=jobs,
        sdist=sdist.absolute() if sdist else None,
        rebuild=rebuild,
        gpu=gpu,
    )
    try:
        job.build(options, progress)
    except BuildError as error:
        raise click.ClickException(str(error)) from None
    progress.note("Horovod is ready.")
