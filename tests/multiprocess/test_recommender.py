"""The example with embeddings: it learns what its data hide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.cluster import QUIET

ROOT = Path(__file__).parents[2]


def test_it_learns_more_than_what_is_popular():
    command = [sys.executable, "-m", "tfdist.cli.main", "run", "--workers", "2", str(ROOT / "examples/recommender.py")]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    model, baseline = (float(auc) for auc in re.findall(r"^AUC .*: (0\.\d+)$", done.stdout, re.MULTILINE))
    assert 0.6 < baseline < 0.7
    assert model > 0.75
