"""Puts a CUDA 12 toolkit together from packages, as far as Horovod's build needs one.

The compiler is Debian 13's, unpacked and not installed; the headers are those of NVIDIA's wheels, which have no nvcc
for CUDA 12. It takes apt-get and dpkg on Debian, and root for neither.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE, SUITE = "nvidia-cuda-toolkit", "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Of the compiler's release. The one with <nv/target> is the next, and that with a static runtime a later one.
HEADERS = (
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-nvcc-cu12==12.4.131",
    "nvidia-cuda-cccl-cu12==12.5.39",
)
RUNTIME = "nvidia-cuda-runtime-cu12==12.9.79"
PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
CUDAFE_FLAGS +=
PTXAS_FLAGS +=
"""


def assemble(home: Path, scratch: Path) -> None:
    """Fill `home` (bin, nvvm, include, lib64), anew where something is there.

    Raises:
        SystemExit: a program or a package cannot be had; says which, and what to do instead.
    """
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    debian = _compiler(scratch)
    shutil.copytree(debian / "usr/lib/nvidia-cuda-toolkit/bin", home / "bin", symlinks=True)
    for name in ("cudafe++", "fatbinary", "nvlink", "ptxas", "bin2c"):
        shutil.copy2(debian / "usr/bin" / name, home / "bin")
    for name in ("gcc", "g++", "nvcc.profile"):  # links to what may not be here, or is for Debian alone
        (home / "bin" / name).unlink()
    (home / "bin/nvcc.profile").write_text(PROFILE, encoding="utf-8")
    (home / "nvvm/bin").mkdir(parents=True)
    (home / "bin/cicc").rename(home / "nvvm/bin/cicc")
    shutil.copytree(debian / "usr/lib/nvidia-cuda-toolkit/libdevice", home / "nvvm/libdevice")
    headers = _wheels(scratch / "headers", HEADERS)
    for folder in sorted(headers.glob("nvidia/*/include")):
        shutil.copytree(folder, home / "include", dirs_exist_ok=True)
    (home / "lib64").mkdir()
    runtime = _wheels(scratch / "runtime", (RUNTIME,)) / "nvidia/cuda_runtime/lib"
    shutil.copy2(runtime / "libcudart_static.a", home / "lib64")
    for file in runtime.glob("libcudart.so.*"):
        shutil.copy2(file, home / "lib64")
        (home / "lib64/libcudart.so").symlink_to(file.name)
    # nvcc names it on every link. What it is for, kernels that start kernels, Horovod does not have; and that of a
    # later release is refused by this linker.
    _run("ar", "rc", home / "lib64/libcudadevrt.a")


def _compiler(scratch: Path) -> Path:
    """The unpacked package of the compiler."""
    for program in ("apt-get", "dpkg", "ar"):
        if shutil.which(program) is None:
            _give_up(f"there is no {program}")
    where = ["--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    mirrors = _run("apt-get", "indextargets", *where).splitlines()
    if not mirrors or not Path(KEYRING).exists():
        _give_up("apt-get knows no mirror of Debian or not its keys")
    apt = scratch / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        (apt / folder).mkdir(parents=True)
    line = f"deb [signed-by={KEYRING}] {mirrors[0]} {SUITE} non-free\n"
    (apt / "sources.list").write_text(line, encoding="utf-8")
    own = [
        *("-o", f"Dir::Etc::SourceList={apt}/sources.list", "-o", f"Dir::Etc::SourceParts={apt}/parts"),
        *("-o", f"Dir::State::Lists={apt}/lists", "-o", f"Dir::Cache={apt}/cache"),
        *("-o", "APT::Sandbox::User="),
    ]
    _run("apt-get", *own, "-q", "update")
    _run("apt-get", *own, "-q", "download", PACKAGE, cwd=scratch)
    found = next(iter(scratch.glob(f"{PACKAGE}_*.deb")), None)
    if found is None:
        _give_up(f"apt-get left no {PACKAGE}")
    _run("dpkg", "-x", found, scratch / "debian")
    return scratch / "debian"


def _wheels(folder: Path, requirements: tuple[str, ...]) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "install", "-q", "--no-deps", "--target", folder, *requirements)
    return folder


def _run(*argv: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        _give_up(f"`{' '.join(map(str, argv))}` failed:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout


def _give_up(why: str) -> None:
    raise SystemExit(
        f"No CUDA 12 toolkit could be put together: {why}\nName one that is installed by CUDA_HOME."
    )
