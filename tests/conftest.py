"""What holds for every test: quiet TensorFlow on the CPU, and no process left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tfdist.launch import processes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

# Every process that a test starts carries this, so that orphans are found too.
MARK = "TFDIST_TEST_SESSION"
os.environ[MARK] = uuid.uuid4().hex

SECONDS_TO_END = 3.0
# Started by Python once, for the rest of the process's life.
PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _expected(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
        return process.status() == psutil.STATUS_ZOMBIE or any(n in line for n in PYTHONS_OWN)
    except psutil.NoSuchProcess:
        return True


def _started(before: set[int], orphans: bool) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    if orphans:
        found += processes.marked(MARK, os.environ[MARK])
    return [p for p in {p.pid: p for p in found}.values() if p.pid not in before]


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes behind, and end them."""
    # Reading every process's environment takes milliseconds: only where processes are started.
    orphans = bool({"multiprocess", "cluster"} & set(request.path.parts))
    before = {process.pid for process in _started(set(), orphans)}
    yield
    left = [p for p in _started(before, orphans) if not _expected(p)]
    if not left:
        return
    _, left = psutil.wait_procs(left, timeout=SECONDS_TO_END)
    names = processes.describe(left)
    processes.kill(left)
    if names:
        pytest.fail(f"the test left processes behind: {names}")
