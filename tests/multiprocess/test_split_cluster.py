"""A model over several tasks of a TF_CONFIG: what is where, and the tasks' lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cluster import QUIET
from tests.multiprocess.test_ps import ENV, nothing_left  # noqa: F401
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.tasks.serving import GONE
from tfdist.tf_config import Cluster, Task

CHECKS = Path(__file__).with_name("split_cluster_checks.py")

TRAINING = """
import os, signal, sys, threading
import keras, numpy as np, tfdist

strategy = tfdist.ModelParallelStrategy(microbatches=2, balance="parameters", start_seconds=60)
print("devices", *strategy.devices, flush=True)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
layers = [keras.layers.Dense(16, "relu") for _ in range(3)]
with strategy.scope():
    model = strategy.distribute(keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(2, "softmax")]))
    model.compile("adam", "sparse_categorical_crossentropy")

class At(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch != 1:
            return
        if "fail" in sys.argv:
            raise OSError("the disk is full")
        if "die" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if "wait" in sys.argv or "stuck" in sys.argv:
            print("ready", flush=True)
            sys.stdin.readline()
        if "stuck" in sys.argv:
            threading.Event().wait()

model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[At()])
print("updates", int(model.optimizer.iterations), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return str(tmp_path / "train.py")


def run_workers(program, *args, workers=2):
    command = [sys.executable, "-m", "tfdist.cli.main", "run", "--ps", "0", "--workers", str(workers), program, *args]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def start(script, tmp_path):
    """Starts one task of a cluster, as a container would; the process, whose errors are in NAME.txt."""
    started = []

    def one(cluster: Cluster, task: Task, *args: str) -> subprocess.Popen:
        env = {**ENV, "TF_CONFIG": cluster.tf_config(task)}
        log = open(tmp_path / f"{task.job}-{task.index}.txt", "w")  # noqa: SIM115
        started.append(
            subprocess.Popen(
                [sys.executable, script, *args],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


def test_checks(tmp_path):
    """Parity with the unsplit model, placement, files: see split_cluster_checks.py."""
    results = tmp_path / "results.json"
    code, _, err = run_workers(str(CHECKS), str(results), str(tmp_path))
    assert results.exists(), err[-5000:]
    failed = {name: trace for name, trace in json.loads(results.read_text()).items() if trace}
    assert not failed, "\n".join(f"--- {name}\n{trace}" for name, trace in failed.items())
    assert code == 0, err[-3000:]


def test_one_script_for_three_tasks(script):
    code, out, err = run_workers(script, workers=3)
    assert code == 0, err
    lines = out.splitlines()
    assert [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(3)] == lines[-2].split()[1:]
    assert lines[-1] == "updates 48"
    assert {"[worker/1] serving as worker/1", "[worker/2] serving as worker/2"} == set(lines[:-2])
    assert "after" not in err


def test_a_chief_beside_the_workers_runs_the_script(start, tmp_path):
    ports = cluster_on_free_ports(0, 2).workers
    cluster = Cluster(ports[0], ports[1:])
    worker = start(cluster, Task("worker", 0))
    chief = start(cluster, Task("chief", 0))
    out, _ = chief.communicate(timeout=120)
    assert chief.returncode == 0, (tmp_path / "chief-0.txt").read_text()
    assert "/job:chief/replica:0/task:0/device:CPU:0 /job:worker/replica:0/task:0/device:CPU:0" in out
    assert "updates 48" in out
    assert worker.wait(30) == 0


def test_a_program_that_fails_takes_the_tasks_along(script):
    code, _, err = run_workers(script, "fail")
    assert code == 1
    assert "OSError: the disk is full" in err


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_task_ends_fit_and_is_named(start, tmp_path, victim):
    cluster = cluster_on_free_ports(0, 3)
    others = [start(cluster, Task("worker", i)) for i in (1, 2)]
    first = start(cluster, Task("worker", 0), "wait")
    while first.stdout.readline() not in ("ready\n", ""):
        pass
    others[victim - 1].kill()
    others[victim - 1].wait()
    killed = time.monotonic()
    first.communicate("go on\n", timeout=90)
    assert time.monotonic() - killed < 60
    assert first.returncode == 1
    err = (tmp_path / "worker-0.txt").read_text()
    said = f"worker/{victim} ({cluster.workers[victim]}) ended during fit, and the layers, weights and slots on its"
    assert said in err.split("RuntimeError: ")[-1]
    assert "start the job again from its last checkpoint" in err
    assert others[2 - victim].wait(40) == 1


def test_a_call_that_does_not_notice_is_ended(start, tmp_path):
    cluster = cluster_on_free_ports(0, 2)
    other = start(cluster, Task("worker", 1))
    first = start(cluster, Task("worker", 0), "stuck")
    while first.stdout.readline() not in ("ready\n", ""):
        pass
    other.kill()
    other.wait()
    first.communicate("go on\n", timeout=90)
    assert first.returncode == GONE
    err = (tmp_path / "worker-0.txt").read_text()
    assert f"tfdist: worker/1 ({cluster.workers[1]}) ended during fit" in err


def test_tasks_of_a_killed_program_leave_by_themselves(start, tmp_path):
    cluster = cluster_on_free_ports(0, 2)
    other = start(cluster, Task("worker", 1))
    first = start(cluster, Task("worker", 0), "die")
    assert first.wait(90) == -signal.SIGKILL
    assert other.wait(40) == GONE
    assert "worker/1: worker/0 gave no answer" in (tmp_path / "worker-1.txt").read_text()


def test_a_task_that_never_comes_is_named(script, start, tmp_path):
    Path(script).write_text(TRAINING.replace("start_seconds=60", "start_seconds=1"))
    cluster = cluster_on_free_ports(0, 2)
    first = start(cluster, Task("worker", 0))
    assert first.wait(60) == 1
    assert f"After 1 s there is no worker/1 ({cluster.workers[1]})" in (tmp_path / "worker-0.txt").read_text()


WRONG = """
import json, os, re, sys
import tfdist
for config, words in json.loads(sys.argv[1]):
    os.environ["TF_CONFIG"] = json.dumps(config)
    try:
        tfdist.ModelParallelStrategy()
    except ValueError as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(words)
print("all refused")
"""


def test_a_wrong_tf_config_is_said_at_once():
    worker, ps = ["127.0.0.1:1", "127.0.0.1:2"], ["127.0.0.1:3"]
    first = {"type": "worker", "index": 0}
    cases = [
        ({"cluster": {"worker": worker, "ps": ps}, "task": first}, "cluster.ps has 1, expected none.*use Para"),
        ({"cluster": {"worker": worker, "evaluator": ps}, "task": first}, "cluster.evaluator has 1, expected none"),
        ({"cluster": {"chief": ps}, "task": {"type": "chief", "index": 0}}, "cluster.worker is not given"),
        ({"cluster": {"worker": worker}, "task": {"type": "worker", "index": 2}}, "task.index is 2"),
        ({"cluster": {"worker": worker}, "task": {"type": "chief", "index": 0}}, "task.index is 0"),
        ({"cluster": {"worker": worker}}, "task is missing"),
    ]
    args = [sys.executable, "-c", WRONG, json.dumps(cases)]
    done = subprocess.run(args, env={**os.environ, **QUIET, **ENV}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "all refused\n", done.stderr[-2000:]
