"""An elastic ring over two hosts: one joins, a rank of it is killed, and the weights are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_hosts import ENV, ROOT, TFDIST
from tests.helpers import hosts as testing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why := testing.missing()), reason=why or "-")]

SCRIPT = str(Path(__file__).with_name("elastic.py"))


def test_a_host_joins_and_a_rank_dies(tmp_path):
    plain = subprocess.run([sys.executable, SCRIPT], env=ENV, capture_output=True, text=True, timeout=120)
    assert plain.returncode == 0, plain.stderr
    words = plain.stdout.splitlines()[-1]
    assert words.startswith("1 ranks, iterations 240, total ")
    offered, discovery = tmp_path / "offered", tmp_path / "discover.sh"
    offered.write_text("alpha:1\n")
    discovery.write_text(f"#!/bin/sh\ncat {offered}\n")
    discovery.chmod(0o755)
    with testing.Hosts(2, tmp_path) as hosts:
        options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(discovery)]
        command = [*TFDIST, "run", "-i", str(hosts.key), *options, "--log-dir", str(tmp_path / "logs"), SCRIPT]
        done = hosts.run(0, [*command, str(tmp_path / "checkpoint"), str(offered)], timeout=200, env=ENV, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("tfdist: round")]
    assert said[0] == "tfdist: round 0: 1 rank on alpha:1"
    assert "hosts have changed. Going on from the last checkpoint." in said[1]
    assert said[2] == "tfdist: round 1: 2 ranks on alpha:1, beta:1"
    assert "rank 1 on beta" in said[3]
    assert "SIGKILL" in said[3]
    assert said[4] == "tfdist: round 2: 2 ranks on alpha:1, beta:1"
    assert len(said) == 5
    assert words.replace("1 ranks", "2 ranks") in done.stdout.splitlines()
    assert len(list((tmp_path / "checkpoint").iterdir())) == 1  # with the job's name: no other job goes on from it
