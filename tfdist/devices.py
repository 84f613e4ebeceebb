"""Which device, or devices, a rank trains on: decided by pure functions, carried out by a thin one.

The variable TFDIST_DEVICE says what the user wants:

    auto     (default) the GPU of the local rank; the CPU on a host with fewer GPUs than ranks
    gpu      the GPU of the local rank, or an error
    gpu:N    the visible GPU number N: where each rank is shown its own GPU only, as gpu:0
    cpu      no GPU

A rank of a split model takes several GPUs: with two a rank, local rank 1 has GPUs 2 and 3 (gpu:N: N and N + 1).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfdist.cluster import World

VARIABLE = "TFDIST_DEVICE"


@dataclass(frozen=True)
class Wish:
    """What TFDIST_DEVICE asks for. `index` is the number in gpu:N, None elsewhere."""

    kind: str
    index: int | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Wish:
        """Read TFDIST_DEVICE.

        Raises:
            ValueError: it holds none of the known forms.
        """
        text = (os.environ if env is None else env).get(VARIABLE, "auto")
        kind, colon, number = text.strip().lower().partition(":")
        if kind == "gpu" and colon and number.isdecimal():
            return cls("gpu", int(number))
        if kind in ("auto", "gpu", "cpu") and not colon:
            return cls(kind)
        raise ValueError(f"{VARIABLE} is {text!r}, expected one of: auto, gpu, gpu:N, cpu.")


def choose_gpu(gpus: Sequence[str], local_rank: int, local_size: int, required: bool) -> int | None:
    """The index of the GPU for one rank, None for the CPU. Pure.

    All ranks of a host decide alike: a ring with some ranks on GPUs and some on the CPU would
    run at the CPU's pace, so fewer GPUs than ranks means the CPU for all.

    Args:
        gpus: names of the GPUs that the rank can see, in order.
        local_rank: the rank among those on its host.
        local_size: ranks on the host.
        required: the user asked for GPUs.

    Raises:
        ValueError: GPUs are required and there are fewer than ranks.

    >>> choose_gpu(["GPU:0", "GPU:1"], local_rank=1, local_size=2, required=False)
    1
    >>> choose_gpu(["GPU:0"], local_rank=1, local_size=2, required=False) is None
    True
    """
    if len(gpus) >= local_size:
        return local_rank
    if not required:
        return None
    seen = ", ".join(gpus) if gpus else "none"
    raise ValueError(
        f"local rank {local_rank} of {local_size} wants a GPU of its own, and {len(gpus)} are "
        f"visible here ({seen}). Start at most {max(1, len(gpus))} ranks on this host, set "
        f"{VARIABLE}=auto or cpu to train on the CPU, or {VARIABLE}=gpu:0 where every rank is "
        "shown its own GPU as the first (as Slurm and Kubernetes do)."
    )


def choose(gpus: Sequence[str], world: World, wish: Wish) -> int | None:
    """The index of the GPU for this rank under the user's wish, None for the CPU. Pure.

    Raises:
        ValueError: the wish cannot be met. The message names rank and host.
    """
    if wish.kind == "cpu":
        return None
    if wish.index is not None:
        if wish.index < len(gpus):
            return wish.index
        raise ValueError(
            f"rank {world.rank} on {world.host}: {VARIABLE}=gpu:{wish.index} names a GPU that is "
            f"not there; visible: {', '.join(gpus) or 'none'}."
        )
    try:
        return choose_gpu(gpus, world.local_rank, world.local_size, wish.kind == "gpu")
    except ValueError as error:
        raise ValueError(f"rank {world.rank} on {world.host}: {error}") from None


def choose_several(
    gpus: Sequence[str], world: World, wish: Wish, per_rank: int
) -> list[int] | None:
    """The indices of the `per_rank` GPUs of this rank, None for logical CPUs. Pure.

    Local rank r has GPUs r * per_rank up to (r + 1) * per_rank - 1. Logical CPUs, which are for
    trying things out, take the place of GPUs where there is none at all, or on request.

    Raises:
        ValueError: there are fewer GPUs than all ranks of the host need together.

    >>> four = ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    >>> choose_several(four, World(1, 2, 1, 2, "host"), Wish("auto"), per_rank=2)
    [2, 3]
    """
    if wish.kind == "cpu" or (not gpus and wish.kind == "auto"):
        return None
    first = world.local_rank * per_rank if wish.index is None else wish.index
    needed = world.local_size * per_rank if wish.index is None else wish.index + per_rank
    if needed <= len(gpus):
        return [*range(first, first + per_rank)]
    if wish.index is None:
        ranks = f"{world.local_size} rank{'s' if world.local_size > 1 else ''}"
        why = f"{ranks} with {per_rank} GPUs each need {needed} on this host"
    else:
        why = f"{VARIABLE}=gpu:{wish.index} and {per_rank} GPUs a rank need {needed}"
    raise ValueError(
        f"rank {world.rank} on {world.host}: {why}, and {len(gpus)} are visible here "
        f"({', '.join(gpus) or 'none'}). Start fewer ranks, give each fewer devices, set "
        f"{VARIABLE}=gpu:0 where every rank is shown its own GPUs only (as Slurm and Kubernetes "
        f"do), or {VARIABLE}=cpu to try it on logical CPUs."
    )


class Config(Protocol):
    """The part of `tf.config` that is used here."""

    def list_physical_devices(self, device_type: str) -> list[Any]:
        """Devices of the machine that TensorFlow can use."""

    def get_visible_devices(self, device_type: str) -> list[Any]:
        """Those of them that it will use."""

    def set_visible_devices(self, devices: list[Any], device_type: str) -> None:
        """Choose; RuntimeError once TensorFlow has started its devices."""

    @property
    def experimental(self) -> Any:
        """Holds get_memory_growth and set_memory_growth."""


def claim(
    world: World, env: Mapping[str, str] | None = None, config: Config | None = None
) -> str | None:
    """Make this rank's GPU the only one that TensorFlow sees, with memory growth on.

    To be called before TensorFlow starts its devices, which its first operation does. Calling it
    again changes nothing.

    Args:
        world: the place of this rank.
        env: variables to read TFDIST_DEVICE from, `os.environ` by default.
        config: `tf.config` by default.

    Returns:
        Name of the GPU, None for the CPU.

    Raises:
        ValueError: there are too few GPUs and the user asked for them.
        RuntimeError: TensorFlow has started its devices already and sees other GPUs.
    """
    config = _config(config)
    wish = Wish.from_env(env)
    gpus = config.list_physical_devices("GPU")
    index = choose([gpu.name for gpu in gpus], world, wish)
    mine = [] if index is None else [gpus[index]]
    _show(mine, world, wish, config)
    return mine[0].name if mine else None


def claim_several(
    world: World,
    per_rank: int,
    env: Mapping[str, str] | None = None,
    config: Config | None = None,
) -> list[str]:
    """Make this rank's `per_rank` GPUs the only ones that TensorFlow sees, as `claim` does.

    Returns:
        Names of the GPUs among all of the host; none where logical CPUs are to be used. TensorFlow
        counts those that it sees from 0.

    Raises:
        ValueError: there are too few GPUs for all ranks of this host.
        RuntimeError: TensorFlow has started its devices already and sees other GPUs.
    """
    config = _config(config)
    wish = Wish.from_env(env)
    gpus = config.list_physical_devices("GPU")
    chosen = choose_several([gpu.name for gpu in gpus], world, wish, per_rank)
    mine = [gpus[index] for index in chosen or ()]
    _show(mine, world, wish, config)
    return [gpu.name for gpu in mine]


def _config(config: Config | None) -> Config:
    if config is not None:
        return config
    import tensorflow as tf

    found: Config = tf.config
    return found


def _show(mine: list[Any], world: World, wish: Wish, config: Config) -> None:
    """Makes `mine` the only GPUs that TensorFlow sees."""
    if not config.list_physical_devices("GPU"):
        return
    try:
        if config.get_visible_devices("GPU") != mine:
            config.set_visible_devices(mine, "GPU")
        for gpu in mine:
            if not config.experimental.get_memory_growth(gpu):
                config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        if world.size == 1 and wish.kind == "auto":
            return  # alone on the host: nobody to collide with
        wanted = ", ".join(gpu.name for gpu in mine) or "the CPU alone"
        raise RuntimeError(
            f"rank {world.rank} on {world.host}: TensorFlow has started its devices already, so "
            f"this rank cannot take {wanted} any more. Create the strategy before the first "
            f"tensor, model or dataset of the program. (TensorFlow: {error})"
        ) from error
