"""Runs one script as several processes that no launcher ties together, each with an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it printed."""

    code: int
    out: str
    err: str


def run(script: str, envs: Sequence[Mapping[str, str]], deadline: float = 120) -> list[Ended]:
    """Run `python script` once for each environment, all at a time.

    Raises:
        AssertionError: not all had ended after `deadline` seconds; they are killed, and their output is shown.
    """
    ends = time.monotonic() + deadline
    command, pipe = [sys.executable, script], subprocess.PIPE
    processes = [
        subprocess.Popen(command, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True) for env in envs
    ]

    def ended(process: subprocess.Popen[str]) -> tuple[bool, Ended]:
        late = False
        try:
            out, err = process.communicate(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            out, err = process.communicate()
        return late, Ended(process.returncode, out, err)

    with ThreadPoolExecutor(len(processes)) as pool:
        found = list(pool.map(ended, processes))
    if late := [number for number, (was_late, _) in enumerate(found) if was_late]:
        shown = "\n".join(f"process {n}:\n{each.out}\n{each.err}" for n, (_, each) in enumerate(found))
        raise AssertionError(f"processes {late} had not ended after {deadline:g} s\n{shown}")
    return [each for _, each in found]
