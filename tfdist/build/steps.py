"""The steps of the build that run pip: tools, source, wheel, installation."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tfdist.build import cache, commands, explain, patch, process, survey_gpu
from tfdist.build.errors import BuildError
from tfdist.build.plan import Plan
from tfdist.build.versions import HOROVOD, SDIST_NAME, SDIST_SHA256

PIP_DEADLINE = 900.0
COMPILE_DEADLINE = 3600.0


def bring_tools(plan: Plan, work: Path, log: Path) -> Path | None:
    """Put the build tools that are missing into `work`; their directory, None if none is missing.

    The user's own environment is left as it is: only the compile sees them.
    """
    if not plan.tools:
        return None
    target = work / "tools"
    argv = commands.tools_command(sys.executable, plan.tools, str(target))
    _pip("install the build tools " + ", ".join(plan.tools), argv, log, os.environ, work)
    return target


def bring_nccl(requirement: str, work: Path, log: Path) -> dict[str, str]:
    """Horovod's variables with the place of NCCL's wheel, which is installed where it is missing.

    Raises:
        BuildError: it cannot be installed, or has no headers or library.
    """
    if survey_gpu.nccl_directory(requirement) is None:
        argv = commands.runtime_command(sys.executable, (requirement,))
        _pip(f"install {requirement}", argv, log, os.environ, work)
    found = survey_gpu.nccl_directory(requirement)
    if found is None:
        raise BuildError(
            f"The installed {requirement} has no nccl.h, or no libnccl.so.2 beside it.",
            f'Install it again: `pip install --force-reinstall --no-deps "{requirement}"`.',
        )
    return {"HOROVOD_NCCL_INCLUDE": f"{found}/include", "HOROVOD_NCCL_LIB": f"{found}/lib"}


def fetch_sdist(
    given: Path | None, env: Mapping[str, str], root: Path, work: Path, log: Path
) -> Path:
    """Horovod's sdist, checked: the one given, the cached one, or the one that pip downloads.

    Args:
        given: a file the user already has, or None.
        env: variables that show the build tools, with which pip reads the sdist's metadata.
        root: the cache's directory.
        work: scratch directory.
        log: the log.

    Raises:
        BuildError: it cannot be had, or it is not the file that is known to be Horovod 0.28.1.
    """
    if given is not None:
        if not given.is_file():
            raise BuildError(f"--sdist {given}: there is no such file.")
        return _checked(given)
    kept = root / "sdist" / SDIST_NAME
    if kept.is_file() and cache.sha256(kept) == SDIST_SHA256:
        return kept
    folder = work / "download"
    argv = commands.download_command(sys.executable, str(folder))
    _pip(f"download Horovod {HOROVOD}", argv, log, env, work)
    found = sorted(folder.glob("horovod-*.tar.gz"))
    if not found:
        raise BuildError(f"pip reported success but left no sdist in {folder}; see {log}")
    cache.replace_file(_checked(found[0]), kept)
    return kept


def unpack(plan: Plan, sdist: Path, work: Path) -> Path:
    """Unpack and patch; the directory of the source."""
    with tarfile.open(sdist) as tar:
        # The file is the known one; the filter only keeps Python 3.12 and later from warning.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)
    source = work / f"horovod-{HOROVOD}"
    patch.apply(source, plan.edits)
    return source


def compile_wheel(source: Path, env: Mapping[str, str], work: Path, log: Path) -> Path:
    """Compile; the wheel."""
    folder = work / "wheel"
    argv = commands.wheel_command(sys.executable, str(source), str(folder))
    _pip("compile Horovod", argv, log, env, work, COMPILE_DEADLINE)
    found = sorted(folder.glob("horovod-*.whl"))
    if not found:
        raise BuildError(f"pip reported success but left no wheel in {folder}; see {log}")
    return found[0]


def install(plan: Plan, wheel: Path, work: Path, log: Path) -> None:
    """Install the wheel, and of its dependencies what is missing."""
    argv = commands.install_command(sys.executable, str(wheel))
    _pip("install Horovod", argv, log, os.environ, work)
    if plan.runtime:
        argv = commands.runtime_command(sys.executable, plan.runtime)
        _pip("install " + ", ".join(plan.runtime), argv, log, os.environ, work)


def _checked(sdist: Path) -> Path:
    found = cache.sha256(sdist)
    if found != SDIST_SHA256:
        raise BuildError(
            f"{sdist} is not the Horovod {HOROVOD} sdist of PyPI: its SHA-256 is {found}, expected "
            f"{SDIST_SHA256}. Fetch it again: pip download --no-deps --no-binary horovod "
            f"horovod=={HOROVOD}"
        )
    return sdist


def _pip(
    what: str,
    argv: list[str],
    log: Path,
    env: Mapping[str, str],
    work: Path,
    deadline: float = PIP_DEADLINE,
) -> None:
    start = log.stat().st_size if log.exists() else 0
    code = process.run(argv, log=log, env=env, deadline=deadline, cwd=work)
    if code != 0:
        with log.open(encoding="utf-8", errors="replace") as file:
            file.seek(start)
            raise BuildError(explain.failure(what, code, log, file.read()))
