"""Looks at the machine: fills `plan.Machine`. Imports neither TensorFlow nor Horovod."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from tfdist.build.plan import BUILD_TOOLS, RUNTIME, Machine
from tfdist.build.versions import TENSORFLOW_DISTRIBUTIONS

# The order in which CMake itself looks; named here because the key must know the choice.
COMPILERS = ("c++", "g++", "clang++")
# horovod/CMakeLists.txt switches these on for the CPU it is compiled on.
CPU_FLAGS = ("avx", "f16c", "fma")
FLAG_VARIABLES = ("CXXFLAGS", "CFLAGS", "LDFLAGS")
_ASK_SECONDS = 20


def look(env: Mapping[str, str] | None = None) -> Machine:
    """The facts about this machine and this Python environment, in well under a second.

    Args:
        env: the environment variables, by default this process' own.
    """
    env = os.environ if env is None else env
    path = env.get("PATH", os.defpath)
    compiler = _compiler(env, path)
    names = [Requirement(text).name for text in (*BUILD_TOOLS, *RUNTIME)]
    return Machine(
        system=platform.system(),
        platform=f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}".strip(),
        python=sys.version_info[:2],
        abi=sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag or "unknown",
        distributions=installed(names),
        tensorflow=installed(TENSORFLOW_DISTRIBUTIONS),
        compiler=compiler,
        compiler_id=_first_line([compiler, "--version"]) if compiler else "",
        make=shutil.which("make", path=path) is not None,
        cmake=_cmake(path),
        mpi=_mpi(path),
        cpu=_cpu_flags(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory=_memory(),
        flags={name: env[name] for name in FLAG_VARIABLES if env.get(name)},
    )


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions by name of those distributions that are installed in this environment."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def installed_horovod() -> str | None:
    """The installed Horovod's version with its local part, None where there is none."""
    return installed(["horovod"]).get("horovod")


def _compiler(env: Mapping[str, str], path: str) -> str | None:
    wanted = (env["CXX"],) if env.get("CXX") else COMPILERS
    return next((found for name in wanted if (found := shutil.which(name, path=path))), None)


def _cmake(path: str) -> str | None:
    program = shutil.which("cmake", path=path)
    words = _first_line([program, "--version"]).split() if program else []
    # "cmake version 3.25.1"; a distributor's suffix (3.31.0-rc1) does not matter here.
    return words[2].partition("-")[0] if len(words) >= 3 else None


def _mpi(path: str) -> str | None:
    program = shutil.which("mpicc", path=path)
    if program is None:
        return None
    # Open MPI's question first, then MPICH's and Intel's.
    return _first_line([program, "--showme:version"]) or _first_line([program, "-v"]) or "unknown"


def _first_line(argv: list[str]) -> str:
    """The first line that a program prints about itself, empty where it fails."""
    lines = asked(argv, _ASK_SECONDS).splitlines()
    # Open MPI puts its own path first ("/usr/bin/mpicc: Open MPI 4.1.4"), which says nothing.
    return lines[0].removeprefix(f"{argv[0]}: ").strip() if lines else ""


def asked(argv: list[str], seconds: float) -> str:
    """What a program prints, on stderr too; empty where there is none, it fails or takes longer."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cpu_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return tuple(sorted(set(CPU_FLAGS) & set(line.split())))


def _memory() -> int:
    """Bytes of memory available; a large number where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return 1 << 62
    kilobytes = next((ln.split()[1] for ln in text.splitlines() if ln.startswith("MemAvail")), None)
    return int(kilobytes) * 1024 if kilobytes else 1 << 62
