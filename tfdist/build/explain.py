"""Turns a failed command's log into a sentence on what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TAIL_LINES = 20

_OFFLINE = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "SSLError",
    "Network is unreachable",
    "Temporary failure in name resolution",
    # All that pip says where it may not retry, and what it says of an index without the package.
    "(from versions: none)",
)
# What pip, CMake or the compiler print -> what is wrong and what to do.
_KNOWN: Mapping[str, str] = {
    "externally-managed-environment": "This Python belongs to the operating system and refuses "
    "pip. Make an environment (`python3 -m venv .venv`), install tfdist and TensorFlow there and "
    "run its `tfdist build-horovod`.",
    "No module named pip": "This environment has no pip. Run `python -m ensurepip` (Debian and "
    "Ubuntu: `apt-get install python3-venv`; uv: `uv pip install pip`).",
    "No space left on device": "The disk is full. Make room, or point TMPDIR and TFDIST_CACHE at a "
    "directory with 1 GB of room.",
    "Killed signal terminated program": "The compiler was killed, most likely for want of memory. "
    "Compile with fewer processes: `tfdist build-horovod --jobs 1`.",
    "Could NOT find MPI": "CMake did not find the MPI whose `mpicc` is on PATH. Install its C++ "
    "part (Debian and Ubuntu: `apt-get install libopenmpi-dev`) or build without it: "
    "`tfdist build-horovod --without-mpi`.",
    "unsupported GNU version": "This nvcc does not take a C++ compiler that new. Install an older "
    "one and name it: `apt-get install g++-12`, then `CXX=g++-12 tfdist build-horovod --gpu`.",
    "libnccl.so.2: cannot open shared object file": "NCCL's library is not where Horovod looks for "
    "it, in the same site-packages: `pip install --force-reinstall nvidia-nccl-cu12` in this "
    "environment.",
    "stdlib.h: No such file": "The C library's headers are missing: `apt-get install libc6-dev`.",
    "is not able to compile a simple test program": "The C++ compiler cannot compile a simple "
    "program. Install a complete one: `apt-get install g++`.",
}


def reason(log: str) -> str | None:
    """What the log of a failed command means, None where it is none of the known cases."""
    for text, meaning in _KNOWN.items():
        if text in log:
            return meaning
    if any(sign in log for sign in _OFFLINE):
        return (
            "The package index could not be reached. Check the network, proxy (HTTPS_PROXY) and "
            "pip's index settings. Without a network, fetch the source elsewhere by `pip download "
            "--no-deps --no-binary horovod horovod==0.28.1`, hand it over by `tfdist build-horovod "
            "--sdist horovod-0.28.1.tar.gz`, and install the build tools beforehand (setuptools "
            "before 81, wheel, packaging; cmake by `apt-get install cmake`)."
        )
    return None


def failure(step: str, code: int | None, log: Path, text: str) -> str:
    """The message for a failed step: the reason where it is known, else the log's last lines.

    Args:
        step: what was attempted, to follow "Could not".
        code: exit code, None after the deadline.
        log: where the log is.
        text: its text.
    """
    how = "it took too long and was ended" if code is None else f"exit code {code}"
    head = f"Could not {step} ({how})."
    known = reason(text)
    if known is not None:
        return f"{head} {known} The log is {log}"
    tail = "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-TAIL_LINES:])
    return f"{head} The last lines of {log}:\n{tail}"
