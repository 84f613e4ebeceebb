"""What a container's health check asks, and what it says."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing

import pytest

from tests.helpers.tf_config import config
from tfdist.launch.health import address

PS = {"chief": ["a:1"], "ps": ["b:2"], "worker": ["c:3"], "evaluator": ["d:4"]}
WORKERS = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("cluster", "task", "asked"),
    [
        (PS, ("chief", 0), ("a", 1)),
        (PS, ("ps", 0), ("b", 2)),
        (PS, ("worker", 0), ("c", 3)),
        (PS, ("evaluator", 0), ("a", 1)),
        (WORKERS, ("worker", 0), ("a", 1)),
        (WORKERS, ("worker", 1), ("a", 1)),
    ],
)
def test_a_server_is_asked_itself_and_others_by_the_first_task(cluster, task, asked):
    job, index = task
    assert address({"TF_CONFIG": config(cluster, {"type": job, "index": index})}) == asked


def test_a_process_alone_is_asked_nothing():
    assert address({}) is None


def check(text):
    command = [sys.executable, "-m", "tfdist.launch.health"]
    return subprocess.run(command, env={"TF_CONFIG": text}, capture_output=True, text=True, timeout=60)


def test_the_exit_code_says_whether_it_answers():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        text = config({"worker": [f"127.0.0.1:{port}", "127.0.0.1:9"]}, {"type": "worker", "index": 0})
        assert check(text).returncode == 0
    done = check(text)
    assert (done.returncode, done.stdout.startswith(f"127.0.0.1:{port} does not answer")) == (1, True)
    assert check("").returncode == 0
