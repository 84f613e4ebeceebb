"""The parameter server on this machine: the checks of ps_checks.py, and the lives of its tasks."""

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
from tfdist.launch import processes
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.tasks.serving import GONE
from tfdist.tf_config import Task

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
MARK = "TFDIST_TEST"  # in the environment of whatever a test starts


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No process of a test outlives it."""
    monkeypatch.setitem(ENV, MARK, str(tmp_path))
    yield
    left = processes.marked(MARK, str(tmp_path))
    lines = processes.describe(left)
    processes.kill(left)
    assert not lines


@pytest.mark.parametrize("workers", [1, 2])
def test_checks(workers, tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, str(Path(__file__).with_name("ps_checks.py")), str(workers), str(results)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400)
    assert results.exists(), done.stderr[-5000:]
    failed = {name: trace for name, trace in json.loads(results.read_text()).items() if trace}
    assert not failed, "\n".join(f"--- {name}\n{trace}" for name, trace in failed.items())
    assert done.returncode == 0, done.stderr[-3000:]


ONE_CORE = """
import os
import keras, numpy as np, tfdist

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the tasks inherit it
strategy = tfdist.ParameterServerStrategy(cluster=tfdist.LocalCluster(workers=1, ps=1))
model = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(np.zeros((640, 8), "f4"), np.zeros((640, 1), "f4"), batch_size=64, verbose=0)
print("updates", int(model.optimizer.iterations))
"""


def test_tasks_that_see_one_core_train():
    """A worker with one thread for operations would wait for itself without end."""
    done = subprocess.run([sys.executable, "-c", ONE_CORE], env=ENV, capture_output=True, text=True, timeout=120)
    assert "updates 10" in done.stdout, done.stderr[-3000:]


TRAINING = """
import os, signal, sys, time
import keras, numpy as np, tfdist

strategy = tfdist.ParameterServerStrategy(start_seconds=60)
print("pid", os.getpid(), flush=True)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
with strategy.scope():
    model = strategy.distribute(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")]))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

class At(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and "fail" in sys.argv:
            raise OSError("the disk is full")
        if epoch == 1 and "die" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)

model.fit(x, y, batch_size=16, epochs=3, verbose=2, callbacks=[At()])
print("updates", int(model.optimizer.iterations), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return str(tmp_path / "train.py")


def run_ps(script, *args):
    command = [sys.executable, "-m", "tfdist.cli.main", "run", "--ps", "1", "--workers", "2", script, *args]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_one_script_for_all_tasks(script):
    code, out, err = run_ps(script)
    assert code == 0, err
    for task in ("ps/0", "worker/0", "worker/1"):
        assert f"[{task}] serving as {task}" in out
    assert "updates 48" in out
    assert "Epoch 3/3" in out
    assert "Failed to" not in err


def test_a_local_clusters_tasks_end_with_a_process_that_is_killed():
    code = """
import os, signal, threading, time
import tfdist
cluster = tfdist.LocalCluster(workers=1, ps=1)
thread = threading.Thread(target=lambda: [cluster.processes["ps/0"].kill(), cluster.processes["ps/0"].wait(),
                                          cluster.restart("ps/0")])  # a task outlives the thread that started it
thread.start()
thread.join()
tfdist.ParameterServerStrategy(cluster=cluster, start_seconds=60)
print("up", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=90)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.endswith("up\n"), done.stderr[-2000:]
    ends = time.monotonic() + 10
    while processes.marked(MARK, ENV[MARK]):
        assert time.monotonic() < ends


def test_the_environment_chooses(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING.replace("ParameterServerStrategy(start_seconds=60)", "auto_strategy()"))
    code, out, err = run_ps(str(tmp_path / "train.py"))
    assert code == 0, err
    assert out.count("tfdist: parameter server, because TF_CONFIG names 2 workers and 1 ps") == 1
    assert "updates 48" in out
    alone = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(alone, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tfdist: one process, because neither" in done.stdout


def test_a_chief_that_fails_takes_the_tasks_along(script):
    code, _, err = run_ps(script, "fail")
    assert code == 1
    assert "OSError: the disk is full" in err


def test_tasks_of_a_killed_chief_leave_by_themselves(script, tmp_path):
    """Started one by one, as containers are: nobody ends them but they themselves."""
    cluster = cluster_on_free_ports(1, 1)
    started = {}
    for task in cluster.tasks():
        env = {**ENV, "TF_CONFIG": cluster.tf_config(task)}
        log = open(tmp_path / f"{task.job}.txt", "wb")  # noqa: SIM115
        args = [sys.executable, script, *(["die"] if task.is_chief else [])]
        started[task.job] = subprocess.Popen(args, env=env, stdout=log, stderr=log)
    try:
        assert started["chief"].wait(90) == -signal.SIGKILL
        died = time.monotonic()
        for job in ("worker", "ps"):
            assert started[job].wait(40) == GONE
            assert "the chief gave no answer" in (tmp_path / f"{job}.txt").read_text()
        assert time.monotonic() - died < 30
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_task_that_never_comes_is_named(script, tmp_path):
    """P14: only one task started."""
    cluster = cluster_on_free_ports(1, 1)
    (tmp_path / "train.py").write_text(TRAINING.replace("start_seconds=60", "start_seconds=1"))
    env = {**ENV, "TF_CONFIG": cluster.tf_config(Task("chief", 0))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"After 1 s there is no ps/0 ({cluster.ps[0]}), worker/0 ({cluster.workers[0]})" in done.stderr


def test_no_chief_is_said_at_once(script):
    """P4."""
    config = {"cluster": {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    env = {**ENV, "TF_CONFIG": json.dumps(config)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "chief" in done.stderr.splitlines()[-1]


def test_the_example_learns(tmp_path):
    """The README's command: the ring's accuracy, one line of code apart."""
    ring, ours = (ROOT / "examples" / name for name in ("ring.py", "parameter_server.py"))
    code = [
        [line for line in file.read_text().split('"""', 2)[2].splitlines() if "print(" not in line]
        for file in (ring, ours)
    ]
    assert sum(a != b for a, b in zip(*code, strict=True)) == 1
    code, out, err = run_ps(str(ours))
    assert code == 0, err
    accuracy = float(out.split("validation accuracy ")[1].split(",")[0])
    assert accuracy >= 0.97
    assert "tfdist: 2 workers, 1 ps: " in out
