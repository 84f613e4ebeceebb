"""Which versions are built, and with which TensorFlow and Python that was tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from tfdist.build.errors import BuildError

HOROVOD = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

TENSORFLOW_RANGE = ((2, 18), (2, 21))
PYTHON_RANGE = ((3, 10), (3, 13))

# Distributions that put a `tensorflow` package into site-packages. A machine has one of them.
TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-cpu-aws",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)
_NCCL = ".nccl"
_INSTALL = 'pip install "tensorflow-cpu>=2.18,<2.22"  (GPU: "tensorflow[and-cuda]>=2.18,<2.22")'


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_python(python: tuple[int, int]) -> None:
    """Raise `BuildError` unless `python` (major, minor) is in the tested range."""
    low, high = PYTHON_RANGE
    if not low <= python <= high:
        raise BuildError(
            f"Python {_dotted(python)} is not supported: Horovod {HOROVOD} is built and tested "
            f"with Python {_dotted(low)} to {_dotted(high)}.",
            f"Make an environment with one of them, "
            f"for instance `python{_dotted(high)} -m venv .venv`, and install tfdist there.",
        )


def choose_tensorflow(installed: Mapping[str, str]) -> tuple[str, str]:
    """The (distribution, version) that Horovod has to be built for.

    Args:
        installed: versions by distribution name, only of `TENSORFLOW_DISTRIBUTIONS`.

    Raises:
        BuildError: there is none, there are two that differ, or the version is out of range.
    """
    if not installed:
        raise BuildError(
            "No TensorFlow is installed in this environment, and Horovod is compiled against one.",
            f"Install it first: {_INSTALL}",
        )
    if len(set(installed.values())) > 1:
        found = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
        raise BuildError(
            f"Several TensorFlow distributions are installed over each other: {found}. They share "
            "one directory, so which one is there is a matter of luck.",
            f"Remove them all (`pip uninstall {' '.join(sorted(installed))}`), then: {_INSTALL}",
        )
    name = min(installed, key=TENSORFLOW_DISTRIBUTIONS.index)
    version = installed[name]
    low, high = TENSORFLOW_RANGE
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        release = ()
    if not low <= release <= high:
        raise BuildError(
            f"{name} {version} is not supported: Horovod {HOROVOD} is built and tested with "
            f"TensorFlow {_dotted(low)} to {_dotted(high)}.",
            f"Install one of them: {_INSTALL}",
        )
    return name, version


def local_version(tensorflow: str, key: str, *, nccl: bool = False) -> str:
    """Horovod's version as the wheel carries it, `0.28.1+tf2.21.0.k<key>`, with NCCL `...nccl.k<key>`.

    So pip shows which TensorFlow an installed Horovod was compiled for, and tfdist reads from it
    whether the installed one is the one it would build. The letter keeps a key of digits a string.
    """
    return f"{HOROVOD}+tf{Version(tensorflow).public}{_NCCL if nccl else ''}.k{key}"


def parse_local_version(version: str) -> tuple[str, str] | None:
    """(TensorFlow version, key) of a Horovod built by tfdist; None for one built by other hands."""
    local = version.partition("+")[2]
    tensorflow, dot, key = local.rpartition(".k")
    if not dot or not tensorflow.startswith("tf"):
        return None
    return tensorflow.removeprefix("tf").removesuffix(_NCCL), key


def has_nccl(version: str) -> bool:
    """Whether a Horovod built by tfdist was built with NCCL."""
    return version.rpartition(".k")[0].endswith(_NCCL)
