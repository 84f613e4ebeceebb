"""Keeps the memory of one step for the next, in the tasks of a cluster."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
MOST = 1 << 30  # bytes: more than tensors of a step are, within a C int


def keep() -> bool:
    """Has glibc's malloc keep freed memory instead of giving it back to the kernel; whether it took the wish.

    A step allocates and frees each parameter and gradient anew. Given back, their pages are cleared by the kernel and
    come by a page fault each, step by step: with gradients of 23 MB a tenth of all processor time. The process keeps
    its largest size so far. Nothing happens where the environment says how malloc is to be (mallopt(3)), and elsewhere
    than on glibc.
    """
    if sys.platform != "linux" or any(name in os.environ for name in OF_THE_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Both: each alone stops glibc from adjusting the other to what the program does.
    return mallopt is not None and all([mallopt(M_MMAP_THRESHOLD, MOST), mallopt(M_TRIM_THRESHOLD, MOST)])
