"""Evaluation beside training: the evaluator's numbers, and what its death or absence means to the chief."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cluster import QUIET
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.tasks.serving import FAILED, GONE
from tfdist.tf_config import Task

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
LINE = re.compile(r"evaluator/0: after ([\d,]+) updates: loss (\S+), accuracy (\S+)")

TRAINING = """
import json, os, signal, sys, time
import keras, numpy as np, tfdist
from tfdist.ps import offers

if "impatient" in sys.argv:
    offers.SILENT = 3.0

EPOCHS = 3
strategy = tfdist.auto_strategy() if "auto" in sys.argv else tfdist.ParameterServerStrategy(start_seconds=60)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
validation = (x[:100], y[:100])
with strategy.scope():
    layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2, "softmax")]
    shape = [] if "unbuilt" in sys.argv else [keras.Input((8,))]
    model = strategy.distribute(lambda: keras.Sequential([*shape, *layers]))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

class At(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and "fail" in sys.argv:
            raise OSError("the disk is full")
        while epoch == 1 and "wait" in sys.argv and not os.path.exists("go"):
            time.sleep(0.1)

    def on_train_end(self, logs=None):
        if "restore" in sys.argv:  # as EarlyStopping does, after the last epoch
            self.model.set_weights([w * 0.5 for w in self.model.get_weights()])

evaluator = json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator"  # TensorBoard itself is not installed
callbacks = [At(), *([keras.callbacks.TensorBoard("logs")] if "board" in sys.argv and evaluator else [])]
given = {} if "nothing" in sys.argv else {"validation_data": validation}
model.fit(x, y, batch_size=16, epochs=EPOCHS, verbose=2, callbacks=callbacks, **given)
loss, accuracy = model.evaluate(*validation, verbose=0)
updates = int(model.optimizer.iterations)
print(f"chief: after {updates:,} updates: loss {loss:#.4g}, accuracy {accuracy:#.4g}", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path / "train.py"


def launched(script, *args):
    command = [sys.executable, "-m", "tfdist.cli.main", "run", "--workers", "1", "--evaluator", str(script), *args]
    done = subprocess.run(command, env=ENV, cwd=script.parent, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def evaluated(out):
    """(updates, loss, accuracy) of each of the evaluator's lines."""
    return LINE.findall(out)


@pytest.fixture
def job(script):
    """Tasks started one by one, as containers are; named or not, the evaluator is one of them."""
    started = {}

    class Job:
        def __init__(self, args, tasks=("chief", "ps", "worker", "evaluator"), named=True):
            self.cluster = cluster_on_free_ports(1, 1, evaluator=named)
            self.args = args
            for task in tasks:
                self.start(task)

        def start(self, job):
            env = {**ENV, "TF_CONFIG": self.cluster.tf_config(Task(job, 0))}
            with open(script.parent / f"{job}.txt", "ab") as log:
                started[job] = subprocess.Popen(
                    [sys.executable, str(script), *self.args], env=env, cwd=script.parent, stdout=log, stderr=log
                )

        def __getitem__(self, job):
            return started[job]

        def text(self, job):
            return (script.parent / f"{job}.txt").read_text()

        def until(self, job, words, seconds=60):
            ends = time.monotonic() + seconds
            while words not in self.text(job):
                assert time.monotonic() < ends, self.text(job)[-3000:]
                time.sleep(0.1)

        def ends_well(self):
            for job in ("chief", "worker", "ps"):
                assert self[job].wait(90) == 0, self.text(job)[-3000:]
            assert "chief: after 48 updates" in self.text("chief")

    yield Job
    for process in started.values():
        process.kill()
        process.wait()


def test_the_last_weights_are_evaluated_as_the_chief_does(script):
    """Also where a callback changed them after the last epoch; beside TensorBoard's curves."""
    code, out, err = launched(script, "restore", "board")
    assert code == 0, err
    assert "[evaluator/0] evaluator/0: after " in out
    lines = evaluated(out)
    assert lines[-1] == re.search(r"chief: after (\S+) updates: loss (\S+), accuracy (\S+)", out).groups()
    assert lines[-1][0] == "48"
    assert len(lines) >= 2
    assert "had not ended" not in err
    assert list((script.parent / "logs" / "evaluator").glob("events.*"))


def test_auto_strategy_and_nothing_to_evaluate(script):
    code, out, err = launched(script, "auto", "nothing")
    assert code == 0, err
    assert "evaluator/0: fit() was given no validation data" in out
    assert "waiting for the evaluator" not in out
    assert not evaluated(out)


def test_a_killed_chief_is_noticed(job):
    tasks = job(["wait"])
    tasks.until("evaluator", "evaluator/0: after ")
    tasks["chief"].send_signal(signal.SIGKILL)
    died = time.monotonic()
    assert tasks["evaluator"].wait(40) == GONE
    assert time.monotonic() - died < 30
    assert "evaluator/0: the chief gave no answer" in tasks.text("evaluator")


def test_a_chief_that_fails_takes_the_evaluator_along(job):
    tasks = job(["fail"])
    assert tasks["evaluator"].wait(90) == FAILED
    assert tasks["chief"].wait(30) == 1


def test_a_dead_evaluator_harms_nobody_and_its_successor_goes_on(job, script):
    """P3: killed between two epochs; nobody named it in TF_CONFIG, as under Kubeflow."""
    tasks = job(["wait", "unbuilt"], named=False)
    tasks.until("evaluator", "evaluator/0: after ")
    tasks["evaluator"].kill()
    tasks["evaluator"].wait()
    tasks.start("evaluator")
    (script.parent / "go").touch()
    tasks.ends_well()
    assert tasks["evaluator"].wait(30) == 0
    assert evaluated(tasks.text("evaluator"))[-1][0] == "48"


def test_a_chief_without_its_evaluator(job):
    """Named but never there."""
    tasks = job(["impatient"], tasks=("chief", "ps", "worker"))
    tasks.ends_well()
    assert "the evaluator did not end in 3 s; the chief leaves" in tasks.text("chief")


def test_further_evaluators_leave(script):
    cluster = dataclasses.replace(cluster_on_free_ports(1, 1), evaluators=("127.0.0.1:1", "127.0.0.1:2"))
    env = {**ENV, "TF_CONFIG": cluster.tf_config(Task("evaluator", 1))}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "evaluator/1: evaluator/0 evaluates, so there is nothing to do here\n")
    serve = [sys.executable, "-c", "import tfdist; tfdist.serve()"]
    done = subprocess.run(serve, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Run the training script there" in done.stderr
