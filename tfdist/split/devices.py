"""Names of devices: those that are there, of which a model's stages get one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.tf_config import Task


def checked(devices: Sequence[str] | int | None, tasks: int = 0) -> list[str]:
    """Full names of devices, all of which there are.

    Args:
      devices: names, how many, or None for all.
      tasks: of the cluster that this process has joined; 0 for none. There a task's CPUs count as one device.

    Raises:
      ValueError: unknown ones, the same twice, or fewer than two.
    """
    if isinstance(devices, int) and devices > 1:
        devices = _first(devices, tasks) if tasks else _so_many(devices)
    if isinstance(devices, (int, str, float)) or not all(isinstance(name, str) for name in devices or ()):
        raise ValueError(
            f"devices is {devices!r}, expected at least two different devices: a list of their names, such as "
            '["/GPU:0", "/GPU:1"], or a number from 2 on.'
        )
    there = [d.name for d in tf.config.list_logical_devices()]
    chosen = _all(tasks) if devices is None else [checked_name(name, there) for name in devices]
    if len(set(chosen)) < max(2, len(chosen)):
        raise ValueError(
            f"model parallel training needs at least two different devices, got {', '.join(chosen) or 'none'}. There "
            f"are {', '.join(there)}; tf.config.set_logical_device_configuration makes several of one."
        )
    return chosen


def nearest(devices: Sequence[str], task: Task | None) -> str:
    """The first device of this process' own task among them, else the first of all."""
    if task is None:
        return devices[0]
    specs = {name: tf.DeviceSpec.from_string(name) for name in devices}
    own = [name for name, spec in specs.items() if (spec.job, spec.task) == (task.job, task.index)]
    return (own or list(devices))[0]


def check_home(model: Any) -> None:
    """ValueError if the model is of a time before TensorFlow joined a cluster, which gave all devices new names."""
    there = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices()]
    for home in {v.value.device for v in model.variables}:
        if not any(_same(one, tf.DeviceSpec.from_string(home)) for one in there):
            raise ValueError(
                f"Model {model.name!r} was built before the strategy joined the cluster of TF_CONFIG: it is on {home}, "
                "which is no more. Make the strategy first, ahead of data and models."
            )


def _all(tasks: int) -> list[str]:
    """All GPUs, or all CPUs where there is none; of a cluster one CPU a task."""
    there = [d.name for d in tf.config.list_logical_devices()]
    cpus = [n for n in there if ":CPU:" in n]
    return [n for n in there if ":GPU:" in n] or ([n for n in cpus if n.endswith(":CPU:0")] if tasks else cpus)


def _first(count: int, tasks: int) -> list[str]:
    chosen = _all(tasks)
    if len(chosen) < count:
        raise ValueError(
            f"devices={count}, but the cluster of TF_CONFIG, of {tasks} tasks, has {len(chosen)}: {', '.join(chosen)}. "
            "Ask for fewer, or list more workers in TF_CONFIG."
        )
    return chosen[:count]


def _so_many(count: int) -> list[str]:
    """Names of GPUs, or of logical CPUs, which are made where TensorFlow has not started yet."""
    if len(tf.config.get_visible_devices("GPU")) >= count:
        return [f"/GPU:{i}" for i in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < count:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        except RuntimeError as error:
            raise ValueError(
                f"devices={count}: there are fewer GPUs, and logical CPUs can only be made before TensorFlow computes "
                "anything. Make the strategy first, ahead of data and models."
            ) from error
    return [f"/CPU:{i}" for i in range(count)]


def checked_name(name: str, there: Sequence[str]) -> str:
    """The full name of a device.

    Raises:
      ValueError: there is none, or several that it may mean.
    """
    try:
        wanted = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
        found = [n for n in there if _same(wanted, tf.DeviceSpec.from_string(n))]
    except ValueError:
        found = []
    if len(found) > 1:
        raise ValueError(f"device {name!r} may be any of {', '.join(found)}. Write the whole name of the one meant.")
    if not found:
        raise ValueError(f"device {name!r} is unknown, expected one of: {', '.join(there)}.")
    return found[0]


def _same(wanted: tf.DeviceSpec, there: tf.DeviceSpec) -> bool:
    fields = ("job", "replica", "task", "device_type", "device_index")
    return all(getattr(wanted, f) in (None, getattr(there, f)) for f in fields)
