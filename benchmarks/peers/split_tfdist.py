"""`ModelParallelStrategy` over two tasks of a TF_CONFIG, each on a core of its own, with one thread to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil

from tfdist.launch.ports import cluster_on_free_ports
from tfdist.launch.processes import die_with_parent
from tfdist.tf_config import Task

# Before TensorFlow is there, and what starts its threads with it.
CORES = sorted(os.sched_getaffinity(0))
os.environ |= {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
CLUSTER = cluster_on_free_ports(0, 2)


def _other_task() -> subprocess.Popen[bytes]:
    """Serves until this process is done; `taskset` would do the same."""

    def pin() -> None:
        die_with_parent()
        os.sched_setaffinity(0, {CORES[1 % len(CORES)]})

    env = {**os.environ, "TF_CONFIG": CLUSTER.tf_config(Task("worker", 1))}
    return subprocess.Popen([sys.executable, "-c", "import tfdist; tfdist.serve()"], env=env, preexec_fn=pin)


OTHER = _other_task()
os.sched_setaffinity(0, {CORES[0]})
os.environ["TF_CONFIG"] = CLUSTER.tf_config(CLUSTER.first)

import keras  # noqa: E402

import tfdist  # noqa: E402
from benchmarks.peers.split_alone import cut  # noqa: E402
from benchmarks.peers.split_keras import SplitKeras  # noqa: E402


class SplitTfdist(SplitKeras):
    def __init__(self) -> None:
        super().__init__()
        tfdist.ModelParallelStrategy()  # returns when the other task serves

    def cut(self, model: keras.Model, batch: int, how: dict[str, Any]) -> tuple[keras.Model, int]:
        return cut(model, None, batch, how)

    def processor(self) -> list[float]:
        other = psutil.Process(OTHER.pid).cpu_times()
        return [*super().processor(), other.user + other.system]


def open() -> SplitTfdist:
    return SplitTfdist()
