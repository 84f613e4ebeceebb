"""The example of the hybrid strategy: one line from that of the model parallel one, and it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.cluster import QUIET

ROOT = Path(__file__).parents[2]


def test_the_example_learns():
    split, ours = (ROOT / "examples" / name for name in ("model_parallel.py", "hybrid.py"))
    code = [
        [line for line in file.read_text().split('"""', 2)[2].splitlines() if "print(" not in line]
        for file in (split, ours)
    ]
    assert sum(a != b for a, b in zip(*code, strict=True)) == 1
    command = [sys.executable, "-m", "tfdist.cli.main", "run", "-np", "2", str(ours)]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logical = "CPU:0 (logical), CPU:1 (logical)"
    assert re.search(rf"tfdist: 2 x 2 devices: rank 0 \(.*\): {re.escape(logical)}; rank 1 ", done.stdout), done.stdout
    ends = re.findall(r"rank (\d): validation accuracy (0\.\d+), weight checksum (\w+)", done.stdout)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"], done.stdout
    assert len({end[1:] for end in ends}) == 1
    assert float(ends[0][1]) >= 0.97
