"""Tasks of a parameter-server job that are killed under `tfdist run`, and a job that is started again."""

from __future__ import annotations

import re

import pytest

from tests.multiprocess.test_ps import nothing_left, run_ps  # noqa: F401

TRAINING = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
folder, die = sys.argv[1], sys.argv[2]
name = f"{task['type']}-{task['index']}"
with open(f"{folder}/{name}", "w") as file:
    file.write(str(os.getpid()))

import keras, numpy as np, tfdist
strategy = tfdist.ParameterServerStrategy(start_seconds=60)
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
with strategy.scope():
    model = strategy.distribute(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2, "softmax")]))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
checkpoint = tfdist.Checkpoint(f"{folder}/checkpoints")

class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 20) and die == "tasks":
            for other in ("ps-0", "worker-1"):
                os.kill(int(open(f"{folder}/{other}").read()), signal.SIGKILL)
        if (self.epoch, batch) == (1, 20) and die == "chief":
            checkpoint.save()
        if (self.epoch, batch) == (1, 30) and die == "chief":
            os.kill(os.getpid(), signal.SIGKILL)

model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=2, callbacks=[checkpoint, Die()])
print("updates", int(model.optimizer.iterations), "accuracy", model.evaluate(x, y, verbose=0)[1], flush=True)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return str(tmp_path / "train.py")


def test_p9_killed_tasks_are_started_again_and_training_goes_on(script, tmp_path):
    code, out, err = run_ps(script, str(tmp_path), "tasks")
    assert code == 0, err
    assert "[ps/0] tfdist: ended by SIGKILL; started again" in err
    assert "[worker/1] tfdist: ended by SIGKILL; started again" in err
    assert re.search(r"tfdist: ps/0 \(127.0.0.1:\d+\) ended; waiting 60 s", out)
    assert "tfdist: all ps tasks are back at update 40, the last one the chief had; going on" in out
    updates = int(re.search(r"updates (\d+)", out)[1])
    assert 40 + 40 <= updates < 120  # epoch 1 and 3, and what epoch 2 did after the restart
    assert "Epoch 3/3" in out


def test_a_job_whose_chief_was_killed_goes_on_at_its_step(script, tmp_path):
    code, out, err = run_ps(script, str(tmp_path), "chief")
    assert code == 128 + 9, err
    code, out, err = run_ps(script, str(tmp_path), "nobody")
    assert code == 0, err
    assert "000001-000000021: epoch 2, step 21, update 61" in out
    assert "updates 120" in out
    assert "Epoch 1/3" not in out
    assert not (tmp_path / "checkpoints").exists()
