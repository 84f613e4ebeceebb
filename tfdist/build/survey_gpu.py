"""Looks for what a build with NCCL needs: fills `gpu.Gpu`, and counts GPUs.

TensorFlow is asked in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

from tfdist.build.errors import BuildError
from tfdist.build.gpu import Gpu, nccl_requirement
from tfdist.build.survey import asked, installed

FLAG_VARIABLES = ("CUDAFLAGS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
_DEFAULT_HOME = "/usr/local/cuda"
# Of the toolkit, by what the user would miss; NVIDIA's layout, NVIDIA's by target, and Debian's.
_LIBRARIES = ("lib64", "lib", "lib/*-linux-gnu", "targets/*/lib")
_NEEDED = {
    "cuda_runtime.h": ("include", "targets/*/include"),
    "libcudart.so": _LIBRARIES,
    "libcudart_static.a": _LIBRARIES,
    "libcudadevrt.a": _LIBRARIES,
}
_TENSORFLOW_SECONDS = 90
_NVCC_SECONDS = 20
_ASK_TENSORFLOW = """
import json, sys
import tensorflow as tf
with open(sys.argv[1], "w") as file:
    json.dump(dict(tf.sysconfig.get_build_info()), file)
"""


def look(distribution: str, env: Mapping[str, str] | None = None) -> Gpu:
    """The facts, in the time that importing TensorFlow takes.

    Args:
        distribution: the TensorFlow that is installed, such as "tensorflow".
        env: the environment variables, by default this process' own.

    Raises:
        BuildError: TensorFlow cannot be imported.
    """
    env = os.environ if env is None else env
    info = _build_info(env)
    nccl = nccl_wheel(distribution)
    home = toolkit(env)
    return Gpu(
        cuda=str(info["cuda_version"]) if info.get("is_cuda_build") else None,
        capabilities=tuple(info.get("cuda_compute_capabilities", ())),  # type: ignore[arg-type]
        nccl=nccl,
        nccl_version=nccl_version(nccl),
        home=home,
        nvcc=nvcc_version(home),
        architectures=_architectures(home),
        missing=_missing(home),
        flags={name: env[name] for name in FLAG_VARIABLES if env.get(name)},
    )


def gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that the driver sees, by name; none where there is no driver."""
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    lines = asked([program, "-L"], _NVCC_SECONDS).splitlines() if program else []
    # "GPU 0: NVIDIA H100 (UUID: GPU-...)"
    return tuple(line.partition(" (UUID")[0] for line in lines if line.startswith("GPU "))


def usable_gpus(env: Mapping[str, str]) -> int:
    """The number of them that CUDA_VISIBLE_DEVICES leaves to a program."""
    count, shown = len(gpus(env)), env.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return count
    return min(count, sum(bool(name.strip()) for name in shown.split(",")))


def toolkit(env: Mapping[str, str]) -> str | None:
    """The directory of the CUDA toolkit: what the user names, else that of nvcc; None for neither."""
    named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if named:
        return named
    found = shutil.which("nvcc", path=env.get("PATH", os.defpath))
    if found is None:
        return _DEFAULT_HOME if Path(_DEFAULT_HOME, "bin", "nvcc").exists() else None
    # On PATH may stand a link or a script: nvcc itself says where it is.
    top = re.search(r"^#\$ TOP=(.+)$", asked([found, "--dryrun", "-x", "cu", os.devnull], _NVCC_SECONDS), re.MULTILINE)
    home = Path(top[1].strip()) if top else Path(found).resolve().parent.parent
    return str(home.resolve())


def nvcc_version(home: str | None) -> str | None:
    """The version of a toolkit's compiler, None where there is none that runs."""
    found = re.search(r"\bV(\d+(?:\.\d+)+)", asked([f"{home}/bin/nvcc", "--version"], _NVCC_SECONDS) if home else "")
    return found[1] if found else None


def nccl_wheel(distribution: str) -> str | None:
    """What an installed TensorFlow asks for as NCCL, None where it asks for none."""
    return nccl_requirement(importlib.metadata.requires(distribution) or ())


def nccl_version(requirement: str | None) -> str | None:
    """The installed version of NCCL's wheel, None where it is not installed."""
    if requirement is None:
        return None
    name = Requirement(requirement).name
    return installed([name]).get(name)


def nccl_directory(requirement: str) -> Path | None:
    """The directory of the installed wheel that has NCCL's include/ and lib/, None without them."""
    try:
        files = importlib.metadata.files(Requirement(requirement).name) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    header = next((file for file in files if file.name == "nccl.h"), None)
    if header is None:
        return None
    root = Path(str(header.locate())).parent.parent
    return root if (root / "lib" / "libnccl.so.2").is_file() else None


def _architectures(home: str | None) -> tuple[int, ...]:
    text = asked([f"{home}/bin/nvcc", "--list-gpu-arch"], _NVCC_SECONDS) if home else ""
    return tuple(sorted({int(number) for number in re.findall(r"compute_(\d+)", text)}))


def _missing(home: str | None) -> tuple[str, ...]:
    if home is None:
        return ()
    return tuple(
        name
        for name, folders in _NEEDED.items()
        if not any(any(Path(home).glob(f"{folder}/{name}")) for folder in folders)
    )


def _build_info(env: Mapping[str, str]) -> dict[str, object]:
    """TensorFlow's own account of its build."""
    with tempfile.TemporaryDirectory(prefix="tfdist-gpu-") as folder:
        answer = Path(folder, "answer.json")
        try:
            done = subprocess.run(
                [sys.executable, "-c", _ASK_TENSORFLOW, str(answer)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={**env, "TF_CPP_MIN_LOG_LEVEL": "3"},
                cwd=folder,
                timeout=_TENSORFLOW_SECONDS,
            )
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            if done.returncode == 0:
                return dict(json.loads(answer.read_text(encoding="utf-8")))
        except subprocess.TimeoutExpired:
            said = f"not done after {_TENSORFLOW_SECONDS} s"
    raise BuildError(
        f"TensorFlow cannot be imported to ask for its CUDA: {said}.", "`tfdist doctor` says more."
    )
