"""The whole of `tfdist build-horovod`: look, plan, take the wheel or build it, install, check."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tfdist.build import cache, check, commands, gpu, plan, steps, survey, survey_gpu
from tfdist.build.errors import BuildError
from tfdist.build.versions import choose_tensorflow, has_nccl


class Progress(Protocol):
    """Where the job says how far it is."""

    def step(self, title: str) -> AbstractContextManager[None]:
        """Entered when a step starts, left when it ends."""

    def note(self, text: str) -> None:
        """One line for the user."""


@dataclass(frozen=True)
class Options:
    """What the user may choose.

    Attributes:
        without_mpi: Gloo alone, even where `mpicc` is there.
        jobs: compiler processes at a time, None for the number that fits.
        sdist: Horovod's sdist, where there is no network.
        rebuild: compile even if the wheel is cached, and install even if it is installed.
        gpu: for GPUs, with NCCL.
    """

    without_mpi: bool = False
    jobs: int | None = None
    sdist: Path | None = None
    rebuild: bool = False
    gpu: bool = False


def build(options: Options, progress: Progress) -> plan.Plan:
    """Leave a Horovod that works with the installed TensorFlow in this environment.

    Returns:
        the plan that was carried out.

    Raises:
        BuildError: with what to install or do.
    """
    machine = survey.look()
    cuda = survey_gpu.look(choose_tensorflow(machine.tensorflow)[0]) if options.gpu else None
    todo = plan.make_plan(
        machine, without_mpi=options.without_mpi, jobs=options.jobs, gpu=cuda
    )
    root = cache.root()
    log = _log(todo, root)
    name, version = todo.tensorflow
    controllers = " and ".join(todo.controllers)
    progress.note(f"Horovod {todo.version} for {name} {version}, controllers: {controllers}")
    if todo.gpu:
        progress.note(gpu.summary(todo.gpu))
    elif has_nccl(survey.installed_horovod() or ""):
        progress.note("The installed one has NCCL, this one has not: `--gpu` builds with it.")
    if _installed(todo, options):
        progress.note("It is installed already.")
    else:
        _provide(todo, options, root, log, progress)
    for controller in todo.controllers:
        if not check.can_check(controller):
            progress.note(f"{controller} is built in, but not checked: there is no mpirun on PATH.")
            continue
        with progress.step(f"Summing a tensor over two processes ({controller})"):
            check.all_reduce(controller, log)
    if todo.gpu:
        _check_nccl(log, progress)
    return todo


def _check_nccl(log: Path, progress: Progress) -> None:
    count = survey_gpu.usable_gpus(os.environ)
    if count < check.RANKS:
        progress.note(
            f"NCCL is built in, but not checked: that takes {check.RANKS} GPUs, and here "
            f"{'is' if count == 1 else 'are'} {count}."
        )
        return
    with progress.step("Summing a tensor over two GPUs (NCCL)"):
        check.all_reduce("gloo", log, "GPU")


def wheel(todo: plan.Plan, progress: Progress) -> Path:
    """The wheel of `todo` in the cache, compiled first where it is not there; nothing is installed.

    Raises:
        BuildError: with what to install or do.
    """
    root = cache.root()
    log = _log(todo, root)
    with _held(todo, root, progress) as work:
        return _obtain(todo, Options(), root, work, log, progress)


def _log(todo: plan.Plan, root: Path) -> Path:
    log = root / "logs" / f"{todo.key}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        raise BuildError(
            f"The cache {root} cannot be written: {error.strerror}. Point TFDIST_CACHE at a "
            "directory that can."
        ) from None
    return log


@contextmanager
def _held(todo: plan.Plan, root: Path, progress: Progress) -> Iterator[Path]:
    """A scratch directory, while no other process builds the same wheel."""
    wheels = cache.WheelCache(root / "wheels")
    with (
        tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as folder,
        wheels.lock(
            todo.key, lambda: progress.note("Another process builds this wheel; waiting for it.")
        ),
    ):
        yield Path(folder)


def _installed(todo: plan.Plan, options: Options) -> bool:
    return survey.installed_horovod() == todo.version and not options.rebuild


def _provide(todo: plan.Plan, options: Options, root: Path, log: Path, progress: Progress) -> None:
    """Install the wheel from the cache, building it first where it is not there."""
    with _held(todo, root, progress) as work:
        if _installed(todo, options):
            # By the one who held the key, in this environment: do not install under its check.
            return
        found = _obtain(todo, options, root, work, log, progress)
        with progress.step("Installing Horovod"):
            steps.install(todo, found, work, log)


def _obtain(
    todo: plan.Plan, options: Options, root: Path, work: Path, log: Path, progress: Progress
) -> Path:
    """The wheel in the cache, where the key is held."""
    wheels = cache.WheelCache(root / "wheels")
    found = None if options.rebuild else wheels.get(todo.key)
    if found is not None:
        progress.note(f"Taking the wheel that was built before: {found}")
        return found
    return wheels.put(
        todo.key,
        _compile(todo, options, root, work, log, progress),
        {"version": todo.version, "tensorflow": todo.tensorflow},
    )


def _compile(
    todo: plan.Plan, options: Options, root: Path, work: Path, log: Path, progress: Progress
) -> Path:
    """The freshly built wheel, in `work`."""
    plan.check_programs(todo)
    # A log for each build; here, where the key is held, so that nobody else writes into it.
    log.write_text("", encoding="utf-8")
    tools = None
    if todo.tools:
        with progress.step(f"Fetching build tools ({', '.join(todo.tools)})"):
            tools = steps.bring_tools(todo, work, log)
    env = commands.tool_environment(os.environ, None if tools is None else str(tools))
    nccl: dict[str, str] = {}
    if todo.gpu and todo.gpu.nccl:
        with progress.step(f"Taking NCCL from {todo.gpu.nccl}"):
            nccl = steps.bring_nccl(todo.gpu.nccl, work, log)
    with progress.step("Fetching Horovod's source"):
        sdist = steps.fetch_sdist(options.sdist, env, root, work, log)
    source = steps.unpack(todo, sdist, work)
    progress.note(f"The compiler's output goes to {log}")
    with progress.step("Compiling Horovod (takes minutes)"):
        return steps.compile_wheel(source, {**env, **todo.environment, **nccl}, work, log)
