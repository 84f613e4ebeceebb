"""What the doctor knows about an environment; plain values. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """One environment.

    Attributes:
        python: (major, minor, micro).
        system: `platform.system()`.
        cores: cores this process may use, and cores of the machine.
        tensorflow: versions by distribution name, of the distributions that hold a `tensorflow`.
        tensorflow_error: why importing it failed, None if it did not or was not tried.
        tensorflow_gpus: GPUs that TensorFlow sees.
        gpus: GPUs that the driver sees (`nvidia-smi -L`), by name.
        cuda: CUDA version that TensorFlow is built with, None where it is built without.
        nvcc: version and place of CUDA's compiler, None where there is none.
        nccl: version of NCCL's wheel, None where it is missing.
        keras: version, None where it is missing.
        backend: Keras' backend, and where it is chosen.
        legacy_keras: TF_USE_LEGACY_KERAS, as it is set.
        horovod: version with its local part, None where it is missing.
        horovod_error: why importing it failed, None if it did not or was not tried.
        controllers: the controllers that are built in, of gloo and mpi.
        operations: the tensor operations built in, of gloo, mpi, nccl, ccl and ddl.
        mpirun: what `mpirun --version` says, None where there is none.
        programs: whether those that a build of Horovod needs are on PATH, by name.
    """

    python: tuple[int, int, int]
    system: str = "Linux"
    cores: tuple[int, int] = (1, 1)
    tensorflow: Mapping[str, str] = field(default_factory=dict)
    tensorflow_error: str | None = None
    tensorflow_gpus: int = 0
    gpus: tuple[str, ...] = ()
    cuda: str | None = None
    nvcc: str | None = None
    nccl: str | None = None
    keras: str | None = None
    backend: tuple[str, str] = ("tensorflow", "the default")
    legacy_keras: str | None = None
    horovod: str | None = None
    horovod_error: str | None = None
    controllers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    mpirun: str | None = None
    programs: Mapping[str, bool] = field(default_factory=dict)


def keras_backend(env: Mapping[str, str], config: str | None, path: str) -> tuple[str, str]:
    """Keras' backend and where it is chosen, by Keras' own order.

    Args:
        env: the environment variables.
        config: text of Keras' configuration file, None where there is none.
        path: where that file is.
    """
    if env.get("KERAS_BACKEND"):
        return env["KERAS_BACKEND"], "KERAS_BACKEND"
    try:
        chosen = json.loads(config)["backend"] if config else None
    except (ValueError, KeyError, TypeError):
        # Keras ignores a broken file too.
        chosen = None
    return (str(chosen), path) if chosen else ("tensorflow", "the default")
