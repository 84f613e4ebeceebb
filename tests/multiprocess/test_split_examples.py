"""The examples of model parallel training, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import QUIET

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["model_parallel", "branches"])
def test_digits_are_learned(name):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    accuracy = re.search(r"validation accuracy (\S+), weight checksum", ended.stdout)
    assert float(accuracy[1]) > 0.9, ended.stdout
