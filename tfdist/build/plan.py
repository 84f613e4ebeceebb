"""What to build: from facts about the machine to switches, tools and cache key. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.version import Version

from tfdist.build import gpu as gpus
from tfdist.build import patch
from tfdist.build.edits import EDITS, GPU
from tfdist.build.errors import BuildError
from tfdist.build.patch import Edit
from tfdist.build.versions import HOROVOD, check_python, choose_tensorflow, local_version

# Horovod's setup.py needs these next to it, because it is built without isolation: it must see the
# TensorFlow of this environment. pkg_resources left setuptools with 81.
BUILD_TOOLS = ("setuptools<81", "wheel", "packaging")
CMAKE_TOOL = "cmake>=3.18"
CMAKE_MINIMUM = Version("3.13")

# Horovod's own run-time dependencies, from its setup.py (without PyTorch and Spark).
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging")

# A compile of TensorFlow's headers takes about a gigabyte.
MEMORY_PER_JOB = 1.5e9


@dataclass(frozen=True)
class Machine:
    """What the build depends on, as `survey.look` finds it; plain values.

    Attributes:
        system: `platform.system()`.
        platform: machine type and C library, such as "linux-x86_64 glibc 2.36".
        python: (major, minor).
        abi: CPython's extension tag, such as "cpython-311-x86_64-linux-gnu".
        distributions: installed versions by distribution name, of those that matter here.
        tensorflow: the same for the TensorFlow distributions alone.
        compiler: path of the C++ compiler, None where there is none.
        compiler_id: what it says about its version.
        make: whether `make` is on PATH.
        cmake: version of the CMake on PATH, None where there is none.
        mpi: what `mpicc` says about its version, None where there is none.
        cpu: those of f16c, avx and fma that the CPU has: Horovod compiles for them.
        cores: CPU cores this process may use.
        memory: bytes of memory available.
        flags: CXXFLAGS, CFLAGS and LDFLAGS where set.
    """

    system: str
    platform: str
    python: tuple[int, int]
    abi: str
    distributions: Mapping[str, str]
    tensorflow: Mapping[str, str]
    compiler: str | None
    compiler_id: str
    make: bool
    cmake: str | None
    mpi: str | None
    cpu: tuple[str, ...]
    cores: int
    memory: int
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One build.

    Attributes:
        tensorflow: (distribution, version) it is for.
        key: twelve hex digits that stand for everything the wheel depends on.
        version: Horovod's version with the TensorFlow and the key in its local part.
        controllers: "gloo", and "mpi" where it is built in.
        environment: variables to set for the compile, and only then: pip refuses a download whose
            setup.py states another version than PyPI.
        tools: requirements that pip has to bring for the compile; they are not installed for good.
        runtime: requirements of Horovod itself that are missing in the environment.
        missing_programs: programs that only a compile needs, and that are not there.
        edits: the changes to make to Horovod's source.
        gpu: what is built for GPUs and with what, None for a build without NCCL.
    """

    tensorflow: tuple[str, str]
    key: str
    version: str
    controllers: tuple[str, ...]
    environment: Mapping[str, str]
    tools: tuple[str, ...]
    runtime: tuple[str, ...]
    missing_programs: tuple[str, ...]
    edits: tuple[Edit, ...] = EDITS
    gpu: gpus.Gpu | None = None


def make_plan(
    machine: Machine,
    *,
    without_mpi: bool = False,
    jobs: int | None = None,
    edits: tuple[Edit, ...] = EDITS,
    gpu: gpus.Gpu | None = None,
) -> Plan:
    """Decide what to build on `machine`.

    A missing program is not an error yet, for the wheel may be in the cache: see `check_programs`.

    Args:
        machine: the facts.
        without_mpi: build the Gloo controller alone even where `mpicc` is there.
        jobs: compiler processes at a time; default: a core each, as far as the memory reaches.
        edits: the changes to make to Horovod's source.
        gpu: build for GPUs with NCCL, from these facts, and with the changes that it needs.

    Raises:
        BuildError: no Linux, or Python or TensorFlow missing or out of the tested range; for GPUs,
            TensorFlow is built without CUDA, or its CUDA's compiler or headers are missing.
    """
    if machine.system != "Linux":
        raise BuildError(
            f"Horovod is built and tested on Linux only, and this is {machine.system}. "
            "Use Linux, on Windows WSL2, or a Linux container."
        )
    check_python(machine.python)
    tensorflow = choose_tensorflow(machine.tensorflow)
    if gpu is not None:
        gpus.check(tensorflow, gpu)
        edits += GPU
    if jobs is None:
        jobs = max(1, min(machine.cores, int(machine.memory / MEMORY_PER_JOB)))
    mpi = None if without_mpi else machine.mpi
    switches = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI" if mpi is None else "HOROVOD_WITH_MPI": "1",
        # CMake 4 refuses the minimum that the Gloo within Horovod names; older ones ignore this.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        **machine.flags,
        **(gpus.switches(gpu) if gpu else {}),
    }
    key = _key(
        {
            "horovod": HOROVOD,
            "patch": patch.fingerprint(edits),
            "tensorflow": tensorflow,
            "abi": machine.abi,
            "platform": machine.platform,
            "cpu": sorted(machine.cpu),
            "compiler": machine.compiler_id,
            "mpi": mpi,
            "switches": switches,
            **(gpus.key_facts(gpu) if gpu else {}),
        }
    )
    version = local_version(tensorflow[1], key, nccl=gpu is not None)
    environment = {
        **switches,
        "HOROVOD_LOCAL_VERSION": version.partition("+")[2],
        "MAKEFLAGS": f"-j{jobs}",
        **({"CXX": machine.compiler} if machine.compiler else {}),
        **({"HOROVOD_CUDA_HOME": gpu.home} if gpu and gpu.home else {}),
    }
    tools = _unmet(BUILD_TOOLS, machine.distributions)
    if machine.cmake is None or Version(machine.cmake) < CMAKE_MINIMUM:
        tools += (CMAKE_TOOL,)
    runtime = _unmet(RUNTIME, machine.distributions)
    if gpu and gpu.nccl:
        name = Requirement(gpu.nccl).name
        runtime += _unmet((gpu.nccl,), {name: gpu.nccl_version} if gpu.nccl_version else {})
    programs = {"g++": machine.compiler is not None, "make": machine.make}
    return Plan(
        tensorflow=tensorflow,
        key=key,
        version=version,
        controllers=("gloo",) if mpi is None else ("gloo", "mpi"),
        environment=environment,
        tools=tools,
        runtime=runtime,
        missing_programs=tuple(name for name, there in programs.items() if not there),
        edits=edits,
        gpu=gpu,
    )


def check_programs(plan: Plan) -> None:
    """Raise `BuildError` where a compile is needed and its programs are missing."""
    if plan.missing_programs:
        names = " and ".join(plan.missing_programs)
        packages = " ".join(plan.missing_programs)
        raise BuildError(
            f"Horovod has to be compiled for {' '.join(plan.tensorflow)}, and there is no {names} "
            f"on PATH. Install it: `apt-get install {packages}` on Debian and Ubuntu, `dnf install "
            f"{packages.replace('g++', 'gcc-c++')}` on Fedora and RHEL; another C++ compiler is "
            "taken from the variable CXX. Then run `tfdist build-horovod` again."
        )


def _key(facts: Mapping[str, object]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unmet(requirements: tuple[str, ...], installed: Mapping[str, str]) -> tuple[str, ...]:
    """Those of `requirements` that the installed versions do not fulfil."""
    unmet = []
    for text in requirements:
        requirement = Requirement(text)
        version = installed.get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(text)
    return tuple(unmet)
