"""What a build with NCCL needs of TensorFlow, CUDA and NCCL, and which switches it takes. Pure.

CUDA's compiler is the machine's, NCCL is the wheel that `tensorflow[and-cuda]` asks for, and the
functions of CUDA's runtime come from TensorFlow's own library when the program runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement

from tfdist.build.errors import BuildError

# Where `survey_gpu` looks for nvcc, in this order.
PLACES = "CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda"


@dataclass(frozen=True)
class Gpu:
    """What a build with NCCL depends on, as `survey_gpu.look` finds it; plain values.

    Attributes:
        cuda: CUDA version that TensorFlow is built with, such as "12.5.1"; None where it is built
            without.
        capabilities: what TensorFlow is compiled for, such as ("sm_80", "compute_90").
        nccl: NCCL's wheel as `tensorflow[and-cuda]` asks for it, such as
            "nvidia-nccl-cu12>=2.27.7,<3.0"; None where it asks for none.
        nccl_version: the version of that wheel that is installed, None where it is not.
        home: directory of the CUDA toolkit that was found, None where there is none.
        nvcc: version of its compiler, such as "12.4.131"; None where there is none.
        architectures: compute capabilities that nvcc compiles for, such as (60, 70, 80, 90).
        missing: files of the toolkit that a build needs and that are not there.
        flags: CUDAFLAGS, NVCC_APPEND_FLAGS and NVCC_PREPEND_FLAGS where set.
    """

    cuda: str | None
    capabilities: tuple[str, ...] = ()
    nccl: str | None = None
    nccl_version: str | None = None
    home: str | None = None
    nvcc: str | None = None
    architectures: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)


def nccl_requirement(requires: Iterable[str]) -> str | None:
    """NCCL's wheel among the requirements of a TensorFlow distribution, None where there is none.

    >>> nccl_requirement(['nvidia-nccl-cu12<3.0,>=2.27.7; extra == "and-cuda"', "numpy>=1.26"])
    'nvidia-nccl-cu12<3.0,>=2.27.7'
    """
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name.startswith("nvidia-nccl"):
            return f"{requirement.name}{requirement.specifier}"
    return None


def check(tensorflow: tuple[str, str], gpu: Gpu) -> None:
    """Raise `BuildError` where a build with NCCL cannot be, with what to install.

    Args:
        tensorflow: (distribution, version) that Horovod is built for.
        gpu: the facts.
    """
    name = " ".join(tensorflow)
    if gpu.cuda is None or gpu.nccl is None:
        raise BuildError(
            f"{name} is built without CUDA, and `--gpu` builds Horovod for GPUs.",
            f"Install the TensorFlow with CUDA: `pip uninstall {tensorflow[0]}`, then `pip install "
            f'"tensorflow[and-cuda]=={tensorflow[1]}"`; or build without `--gpu`.',
        )
    major, dot_minor = gpu.cuda.split(".")[0], ".".join(gpu.cuda.split(".")[:2])
    install = (
        f"Install CUDA {major}'s compiler and headers: `apt-get install {_packages(dot_minor)}` from "
        f"NVIDIA's repository, Debian 13's `nvidia-cuda-toolkit` from non-free, or an image "
        f"nvidia/cuda:{major}...-devel; name a toolkit that is not on PATH by CUDA_HOME. (NVIDIA's "
        f"wheels on PyPI for CUDA 12 have parts of nvcc only.)"
    )
    if gpu.nvcc is None:
        where = f"{gpu.home} has no bin/nvcc that runs" if gpu.home else f"{PLACES} have none"
        raise BuildError(
            f"{name} is built with CUDA {gpu.cuda}, and Horovod's part for GPUs is compiled with "
            f"nvcc of CUDA {major}: {where}.",
            install,
        )
    if gpu.nvcc.split(".")[0] != major:
        raise BuildError(
            f"{name} is built with CUDA {gpu.cuda}, and the nvcc of {gpu.home} is of CUDA {gpu.nvcc}: "
            f"both have to be of CUDA {major}, since they share one process.",
            install,
        )
    if gpu.missing:
        raise BuildError(
            f"The CUDA toolkit in {gpu.home} has nvcc {gpu.nvcc} but not {', '.join(gpu.missing)}.",
            install,
        )
    if not _capabilities(gpu):
        raise BuildError(
            f"nvcc {gpu.nvcc} in {gpu.home} compiles for none of what {name} is compiled for "
            f"({', '.join(gpu.capabilities)}).",
            install,
        )


def switches(gpu: Gpu) -> dict[str, str]:
    """Horovod's variables for a build with NCCL, those without a path in them."""
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        # For the GPUs that TensorFlow itself is compiled for; the last also as PTX, for later ones.
        "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(map(str, _capabilities(gpu))),
        # Ranges for NVIDIA's profiler: built in or not by what headers lie around.
        "HOROVOD_WITHOUT_NVTX": "1",
        **gpu.flags,
    }


def key_facts(gpu: Gpu) -> dict[str, object]:
    """What the wheel depends on beside the switches."""
    return {"cuda": gpu.cuda, "nvcc": gpu.nvcc, "nccl": gpu.nccl}


def summary(gpu: Gpu) -> str:
    """One line on what is built for GPUs and with what."""
    capabilities = ", ".join(f"{cc // 10}.{cc % 10}" for cc in _capabilities(gpu))
    have = f"{gpu.nccl_version} is here" if gpu.nccl_version else "to be installed"
    return (
        f"GPUs: NCCL ({gpu.nccl}, {have}), nvcc {gpu.nvcc} in {gpu.home}, for compute capabilities "
        f"{capabilities}"
    )


def _capabilities(gpu: Gpu) -> tuple[int, ...]:
    """Compute capabilities to compile for, 90 for 9.0, in order."""
    wanted = {int(found[0]) for text in gpu.capabilities if (found := re.findall(r"\d+", text))}
    return tuple(sorted(wanted & set(gpu.architectures)))


def _packages(version: str) -> str:
    suffix = version.replace(".", "-")
    return f"cuda-nvcc-{suffix} cuda-cudart-dev-{suffix}"
