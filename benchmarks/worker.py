"""One rank of one variant: `python -m benchmarks.worker VARIANT`, told what to do over a connection.

It stays alive through the whole benchmark, so that variants can take turns of a second or two: what else runs
on the machine then hits all of them alike. Imports nothing but the standard library before it is pinned.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any, Protocol

VARIANTS = {
    "keras": "benchmarks.peers.keras_fit",
    "tfdist": "benchmarks.peers.tfdist_fit",
    "horovod": "benchmarks.peers.horovod_loop",
    "torch": "benchmarks.peers.torch_ddp",
    "allreduce": "benchmarks.peers.ring_alone",
    "ps keras": "benchmarks.peers.ps_keras",
    "ps tfdist": "benchmarks.peers.ps_tfdist",
    "ps tf_keras": "benchmarks.peers.ps_tf_keras",
    "ps digits": "benchmarks.peers.ps_digits",
    "split keras": "benchmarks.peers.split_keras",
    "split alone": "benchmarks.peers.split_alone",
    "split tfdist": "benchmarks.peers.split_tfdist",
    "split torch": "benchmarks.peers.split_torch",
}
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


class Variant(Protocol):
    """What a module of `VARIANTS` makes by its `open`; those of `ps` and `split` have methods of their own."""

    def prepare(self, model: str, steps: int) -> dict[str, Any]:
        """Builds the model and runs a few steps; facts for the report."""
        ...

    def run(self) -> list[float]:
        """Trains for the prepared number of steps; seconds of each."""
        ...


def pin(rank: int) -> None:
    """One core a rank, and one thread to compute with."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    if "BENCHMARK_UNPINNED" not in os.environ:
        pin(rank)
    host, port = os.environ["BENCHMARK_ADDRESS"].split(":")
    with Client((host, int(port)), authkey=os.environ["BENCHMARK_KEY"].encode()) as driver:
        try:
            driver.send((rank, os.getpid()))
            variant = importlib.import_module(VARIANTS[sys.argv[1]]).open()
            driver.send((None, None))
            while (call := driver.recv()) is not None:
                method, args = call
                driver.send((None, getattr(variant, method)(*args)))
        except EOFError:
            return  # the driver has ended
        except Exception:
            driver.send((traceback.format_exc(), None))


if __name__ == "__main__":
    main()
