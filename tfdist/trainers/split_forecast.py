"""The plan and the report of a saved model for devices that are not here."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.planner.outlook import Report
from tfdist.planner.plan import Plan
from tfdist.split import planning, survey
from tfdist.split.network import Network
from tfdist.trainers.models import check_backend
from tfdist.trainers.split_report import slot_bytes

BLOCK, REPEATS = 64 * 2**20, 5  # bytes that are copied to measure this machine's memory, and how often
LONGEST = 300  # characters of a reason
IN_PYTHON = "in the script that builds the model, print(ModelParallelStrategy(...).report(model)) says the same"


def forecast(
    path: Path, devices: int, asked: dict[str, Any], bytes_per_second: float | None = None
) -> tuple[Plan, Report]:
    """Plans for so many devices, timing the model's operations on one of this machine.

    Args:
      path: of a saved Keras model.
      devices: how many there will be.
      asked: arguments of `planning.wishes` but for the devices; with a batch_size.
      bytes_per_second: between devices; None: as measured by a copy in this machine's memory.

    Raises:
      ValueError: the file holds no model that can be loaded here, or as `ModelParallelStrategy`.
      OSError: the file cannot be read.
    """
    check_backend()
    names = [f"device {i}" for i in range(devices)]
    wishes = planning.wishes(names, **asked)
    source = "given"
    if bytes_per_second is None:
        bytes_per_second, source = memory_bytes_per_second(), "measured: a copy in this machine's memory"
    there = tf.config.list_logical_devices()
    tried = next((d for d in there if d.device_type == "GPU"), there[0])
    wishes = dataclasses.replace(
        wishes, timed_on=tried.name, bytes_per_second=bytes_per_second, speed_source=source
    )
    model = load(path)
    network = Network(model)
    plan = planning.plan(network, wishes)
    return plan, survey.report(network, plan, wishes, asked["batch_size"], slot_bytes(model))


def load(path: Path) -> keras.Model:
    """A saved model, with its optimizer where that loads as well.

    Raises:
      ValueError: it is something else, or needs classes that are not known here.
      OSError: it cannot be read.
    """
    try:
        loaded = _loaded(path)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be loaded: {_why(str(error))}; {IN_PYTHON}.") from error
    if not isinstance(loaded, keras.Model):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a keras.Model.")
    return loaded


def memory_bytes_per_second() -> float:
    """Of a copy in this machine's memory, by trying."""
    source, target = np.ones(BLOCK, np.uint8), np.zeros(BLOCK, np.uint8)
    spent = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        np.copyto(target, source)
        spent.append(time.perf_counter() - began)
    return BLOCK / float(np.median(spent))


def _loaded(path: Path) -> Any:
    """The optimizer, which tells how many slots there are, comes with what `compile` was given; that may not load."""
    try:
        return keras.saving.load_model(path)
    except Exception:
        return keras.saving.load_model(path, compile=False)


def _why(said: str) -> str:
    """Keras' reason in few words: its texts hold the model's whole configuration."""
    strange = dict.fromkeys(re.findall(r"Could not locate (?:class|function) '([^']+)'", said))
    if strange:
        return f"it needs {', '.join(strange)}, which only the code that wrote it knows"
    if "safe_mode" in said:
        return "it holds a Python lambda, which Keras does not load from files that may be anyone's"
    return textwrap.shorten(said.strip().split("\n")[0], LONGEST, placeholder=" ...").rstrip(".")
