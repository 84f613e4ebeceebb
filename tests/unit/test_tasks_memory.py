"""What a worker or ps task asks of malloc."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Allocates and frees 8 MB after 8 MB; says whether the wish was taken, and the page faults of that.
PROGRAM = """
import resource
from tfdist.tasks import memory
kept = memory.keep()
for _ in range(5):
    bytearray(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytearray(8 << 20)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
GLIBC = hasattr(ctypes.CDLL(None), "mallopt") if sys.platform == "linux" else False


def faults(**variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return tuple(int(word) for word in done.stdout.split())


@pytest.mark.skipif(not GLIBC, reason="not glibc")
def test_freed_memory_is_used_again():
    pages = 50 * (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    kept, again = faults()
    assert kept
    assert again < pages / 10


@pytest.mark.skipif(not GLIBC, reason="not glibc")
def test_the_users_own_wishes_stand():
    kept, again = faults(MALLOC_MMAP_THRESHOLD_="65536")
    assert not kept
    assert again > 50 * (8 << 20) // os.sysconf("SC_PAGE_SIZE") / 2
