"""Gathers `facts.Facts`. TensorFlow and Horovod are imported in a process of their own.

So the doctor survives whatever they do (a crash of the compiled part included), prints none of
their start-up noise, and is done after the deadline.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.build import survey, survey_gpu
from tfdist.build.versions import TENSORFLOW_DISTRIBUTIONS
from tfdist.doctor.facts import Facts, keras_backend

DEADLINE = 90.0
_ASK_SECONDS = 10.0

# A string: within tfdist only comm/horovod.py imports Horovod. The answer is a file, because
# anything may be printed. Each part is written as soon as it is known, for a crash may follow.
SCRIPT = """
import json, pathlib, sys

answer = {"tensorflow_error": "importing it crashed", "horovod_error": None}
def tell():
    pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))

def message(error):
    return f"{type(error).__name__}: {error}"

tell()
try:
    import tensorflow as tf
    answer["tensorflow_error"] = None
    answer["tensorflow_gpus"] = len(tf.config.list_physical_devices("GPU"))
    info = tf.sysconfig.get_build_info()
    answer["cuda"] = info["cuda_version"] if info.get("is_cuda_build") else None
except Exception as error:
    answer["tensorflow_error"] = message(error)
if answer["tensorflow_error"] is None:
    answer["horovod_error"] = "importing it crashed"
    tell()
    try:
        import horovod.tensorflow as hvd
        built = {"gloo": hvd.gloo_built, "mpi": hvd.mpi_built, "nccl": hvd.nccl_built,
                 "ccl": hvd.ccl_built, "ddl": hvd.ddl_built}
        answer["operations"] = [name for name, asked in built.items() if asked()]
        answer["horovod_error"] = None
    except Exception as error:
        answer["horovod_error"] = message(error)
tell()
"""


def look(env: Mapping[str, str] | None = None) -> Facts:
    """The facts about this environment; takes as long as importing TensorFlow does.

    Args:
        env: the environment variables, by default this process' own.
    """
    env = os.environ if env is None else env
    machine = survey.look(env)
    versions = survey.installed(["keras", "horovod"])
    answer = _ask_libraries(env) if machine.tensorflow else {}
    operations: tuple[str, ...] = tuple(answer.get("operations", ()))
    home = Path(env.get("KERAS_HOME") or Path.home() / ".keras")
    config = home / "keras.json"
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        cores=(machine.cores, os.cpu_count() or machine.cores),
        tensorflow=survey.installed(TENSORFLOW_DISTRIBUTIONS),
        tensorflow_error=answer.get("tensorflow_error"),
        tensorflow_gpus=answer.get("tensorflow_gpus", 0),
        gpus=survey_gpu.gpus(env),
        cuda=answer.get("cuda"),
        nvcc=_nvcc(env),
        nccl=_nccl(machine.tensorflow),
        keras=versions.get("keras"),
        backend=keras_backend(env, _read(config), str(config)),
        legacy_keras=env.get("TF_USE_LEGACY_KERAS"),
        horovod=versions.get("horovod"),
        horovod_error=answer.get("horovod_error") if "horovod" in versions else None,
        controllers=tuple(name for name in operations if name in ("gloo", "mpi")),
        operations=operations,
        mpirun=_mpirun(env),
        programs={"g++": machine.compiler is not None, "make": machine.make},
    )


def _ask_libraries(env: Mapping[str, str]) -> dict[str, Any]:
    """What the script found out in a process of its own."""
    # Another backend than TensorFlow's is a finding, not a reason for the import to fail.
    env = {**env, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as folder:
        file = Path(folder, "answer.json")
        try:
            subprocess.run(
                [sys.executable, "-c", SCRIPT, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                cwd=folder,
                timeout=DEADLINE,
            )
        except subprocess.TimeoutExpired:
            return {"tensorflow_error": f"importing it took more than {DEADLINE:.0f} s"}
        text = _read(file)
    return dict(json.loads(text)) if text else {"tensorflow_error": "Python did not start"}


def _nvcc(env: Mapping[str, str]) -> str | None:
    home = survey_gpu.toolkit(env)
    version = survey_gpu.nvcc_version(home)
    return f"{version} in {home}" if version else None


def _nccl(tensorflow: Mapping[str, str]) -> str | None:
    found = (survey_gpu.nccl_version(survey_gpu.nccl_wheel(name)) for name in tensorflow)
    return next((version for version in found if version), None)


def _mpirun(env: Mapping[str, str]) -> str | None:
    return _ask(["mpirun", "--version"], env).partition("\n")[0].strip() or None


def _ask(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """What a program prints; empty where there is none or it fails."""
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=dict(env),
            timeout=_ASK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
