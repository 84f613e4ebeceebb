"""What the launcher needs to be there, looked up without loading TensorFlow or Horovod."""

from __future__ import annotations

import mmap
import shutil
from importlib.util import find_spec
from pathlib import Path

# The classes' names as the Itanium C++ ABI writes them into the library's type information.
CONTROLLERS = {
    "gloo": b"N7horovod6common14GlooControllerE",
    "mpi": b"N7horovod6common13MPIControllerE",
}


def built_controllers() -> tuple[str, ...] | None:
    """The controllers of the installed Horovod; None where Horovod or its library is missing."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    for library in sorted((root / "tensorflow").glob("mpi_lib*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            return tuple(name for name, symbol in CONTROLLERS.items() if m.find(symbol) >= 0)
    return None


def problem(controller: str, built: tuple[str, ...] | None, mpirun: str | None) -> str | None:
    """Why the controller cannot be used, with the remedy; None when it can. Pure.

    Args:
        controller: "gloo" or "mpi".
        built: the answer of `built_controllers`.
        mpirun: path of mpirun, None where there is none.
    """
    if built is None:
        return (
            "more than one rank needs Horovod, which is not installed for TensorFlow in this "
            "environment: run `tfdist build-horovod`, or start one rank with -np 1."
        )
    if controller not in built:
        have = ", ".join(built) or "none"
        first = "install MPI (mpicc, mpirun), then " if controller == "mpi" else ""
        return (
            f"the installed Horovod was built without the controller {controller!r} (it has: "
            f"{have}): {first}run `tfdist build-horovod`, or choose another --controller."
        )
    if controller == "mpi" and mpirun is None:
        return (
            "--controller mpi needs `mpirun` on PATH, and there is none: install an MPI (Debian: "
            "openmpi-bin), run `tfdist build-horovod`, or use --controller gloo."
        )
    return None


def controller_problem(controller: str) -> str | None:
    """`problem`, asked of this machine."""
    return problem(controller, built_controllers(), shutil.which("mpirun"))
