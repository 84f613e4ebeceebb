"""Judges an environment: what is wrong, what is worth knowing, and how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from tfdist.build.errors import BuildError
from tfdist.build.versions import (
    check_python,
    choose_tensorflow,
    has_nccl,
    parse_local_version,
)
from tfdist.doctor.facts import Facts

BUILD = "Run `tfdist build-horovod`."
BUILD_GPU = "Run `tfdist build-horovod --gpu`."


@dataclass(frozen=True)
class Finding:
    """One thing to tell the user.

    Attributes:
        wrong: True if tfdist does not work like this, False for something worth knowing.
        what: what was found.
        mend: what to do about it.
    """

    wrong: bool
    what: str
    mend: str


def findings(facts: Facts) -> list[Finding]:
    """All there is to say about `facts`, wrong things first; empty if all is well."""
    found = [*_platform(facts), *_keras(facts)]
    tensorflow = list(_tensorflow(facts))
    found += tensorflow
    if facts.horovod is None:
        found.append(_no_horovod(facts))
    elif not tensorflow:
        # What Horovod was built for and whether it loads says nothing beside a broken TensorFlow.
        found += _horovod(facts, facts.horovod)
        found += _gpu(facts)
    return sorted(found, key=lambda finding: not finding.wrong)


def _platform(facts: Facts) -> Iterator[Finding]:
    if facts.system != "Linux":
        yield Finding(
            True,
            f"This is {facts.system}; tfdist is tested on Linux only.",
            "Use Linux, on Windows WSL2, or a Linux container.",
        )
    try:
        check_python(facts.python[:2])
    except BuildError as error:
        yield _from(error)


def _tensorflow(facts: Facts) -> Iterator[Finding]:
    try:
        choose_tensorflow(facts.tensorflow)
    except BuildError as error:
        yield _from(error)
    if facts.tensorflow_error is not None:
        yield Finding(
            True,
            f"TensorFlow cannot be imported: {facts.tensorflow_error}",
            'See it whole by `python -c "import tensorflow"`, then install TensorFlow again: '
            '`pip install --force-reinstall "tensorflow-cpu>=2.18,<2.22"`.',
        )


def _keras(facts: Facts) -> Iterator[Finding]:
    if facts.keras is None:
        if facts.tensorflow:
            yield Finding(True, "Keras is not installed.", "Run `pip install keras`.")
        return
    if Version(facts.keras).major < 3:
        yield Finding(
            True,
            f"Keras {facts.keras} is installed; tfdist trains Keras 3 models.",
            'Run `pip install "keras>=3.5"`.',
        )
    name, origin = facts.backend
    if name != "tensorflow":
        remedy = "Unset it" if origin == "KERAS_BACKEND" else f"Set `backend` in {origin}"
        yield Finding(
            True,
            f"Keras' backend is {name!r}, chosen by {origin}; tfdist trains on TensorFlow.",
            f"{remedy} or run with `KERAS_BACKEND=tensorflow`.",
        )
    # TensorFlow reads the variable so: these three mean yes.
    if (facts.legacy_keras or "").lower() in ("1", "true"):
        yield Finding(
            True,
            f"TF_USE_LEGACY_KERAS={facts.legacy_keras} makes tf.keras the old Keras 2 (tf_keras), "
            "whose models tfdist does not train.",
            "Unset TF_USE_LEGACY_KERAS.",
        )


def _no_horovod(facts: Facts) -> Finding:
    missing = [name for name, there in facts.programs.items() if not there]
    first = f"Install {' and '.join(missing)} (`apt-get install {' '.join(missing)}`) first. "
    return Finding(
        True,
        "Horovod is not installed: scripts run on one rank only.",
        (first if missing else "") + BUILD,
    )


def _horovod(facts: Facts, version: str) -> Iterator[Finding]:
    built = parse_local_version(version)
    again = BUILD_GPU if has_nccl(version) else BUILD
    if built is not None and built[0] not in facts.tensorflow.values():
        yield Finding(
            True,
            f"Horovod {version} was built for TensorFlow {built[0]}, and installed is "
            f"{', '.join(sorted(set(facts.tensorflow.values())))}.",
            again,
        )
        return
    if "libnccl.so" in (facts.horovod_error or ""):
        yield Finding(
            True,
            f"Horovod {version} is built with NCCL, and its library is not found: "
            f"{facts.horovod_error}",
            "Run `pip install --force-reinstall nvidia-nccl-cu12`, or `tfdist build-horovod` for one "
            "without NCCL.",
        )
        return
    if facts.horovod_error is not None:
        yield Finding(
            True,
            f"Horovod {version} cannot be imported: {facts.horovod_error}",
            again.replace("`.", " --rebuild`."),
        )
        return
    if not facts.controllers:
        yield Finding(True, "Horovod has neither the Gloo nor the MPI controller.", BUILD)
    if "mpi" in facts.controllers and facts.mpirun is None:
        alone = "gloo" not in facts.controllers
        yield Finding(
            alone,
            "Horovod has the MPI controller, but there is no mpirun on PATH.",
            "Install it (`apt-get install openmpi-bin`)"
            + ("." if alone else " if you want to use MPI; Gloo works without."),
        )
    if built is None:
        yield Finding(
            False,
            f"Horovod {version} was not built by tfdist. Gloo over several hosts fails in "
            "the unpatched 0.28.1 where a host name resolves to a loopback address.",
            f"{BUILD} Nothing to do on one machine.",
        )


def _gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpus and not facts.tensorflow_gpus:
        yield Finding(
            False,
            f"The driver sees {len(facts.gpus)} GPUs, TensorFlow none: it trains on the CPU.",
            'Run `pip install "tensorflow[and-cuda]>=2.18,<2.22"` instead of tensorflow-cpu, '
            "and see that CUDA_VISIBLE_DEVICES is not empty.",
        )
    if facts.tensorflow_gpus and facts.controllers and "nccl" not in facts.operations:
        yield Finding(
            False,
            "TensorFlow sees GPUs, and Horovod is built without NCCL: gradients travel through the "
            "hosts' memory.",
            f"{_nvcc_first(facts)}{BUILD_GPU}",
        )
    if "nccl" in facts.operations and facts.cuda is None:
        yield Finding(
            False,
            "Horovod is built with NCCL, and the installed TensorFlow without CUDA: it was built "
            "for another one.",
            f"{BUILD} Or install the TensorFlow with CUDA again.",
        )


def _nvcc_first(facts: Facts) -> str:
    """What to do about nvcc before Horovod can be built with NCCL."""
    major = (facts.cuda or "").partition(".")[0]
    if not major or (facts.nvcc or "").startswith(f"{major}."):
        return ""
    return f"Install nvcc of CUDA {major} (here is {facts.nvcc or 'none'}) and set CUDA_HOME. "


def _from(error: BuildError) -> Finding:
    """The build's refusal as a finding."""
    return Finding(True, error.what, error.mend)
