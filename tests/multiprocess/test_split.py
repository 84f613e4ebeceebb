"""The model parallel strategy on logical devices: the checks of split_checks.py, in a process that has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.cluster import QUIET

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}


def test_checks(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, str(Path(__file__).with_name("split_checks.py")), str(results)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=500)
    assert results.exists(), done.stderr[-5000:]
    found = json.loads(results.read_text())
    assert len(found) > 5
    failed = {name: trace for name, trace in found.items() if trace}
    assert not failed, "\n".join(f"--- {name}\n{trace}" for name, trace in failed.items())
