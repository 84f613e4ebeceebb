"""Training scripts as jobs of `tfdist run`: killed and started again, and over MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.cluster import QUIET, needs_mpi

ROOT = Path(__file__).parents[2]

TRAINING = """
import os, signal, sys
import keras, numpy as np, tfdist

strategy = tfdist.RingAllReduceStrategy(**{options})
keras.utils.set_random_seed(7)
with strategy.scope():
    model = strategy.distribute(keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.{optimizer}, "mse")
random = np.random.default_rng(5)
x, y = random.normal(size=(64, 6)), random.normal(size=(64, 1))
"""
RESUMABLE = TRAINING.format(options={}, optimizer="Adam(0.01)") + textwrap.dedent("""
    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 4 and tfdist.rank() == 1 and "kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)

    history = model.fit(x, y, batch_size=16, epochs=6, verbose=0,
                        callbacks=[keras.callbacks.BackupAndRestore(sys.argv[1]), Kill()])
    print("epochs", history.epoch, "iterations", int(model.optimizer.iterations.numpy()),
          "sums", [float(np.sum(v)) for v in model.optimizer.variables + model.variables])
""")


@pytest.fixture
def train(tmp_path):
    """Run a script under `tfdist run`; (exit code, stdout, stderr)."""

    def start(script, *args, controller="gloo"):
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, "-m", "tfdist.cli.main", "run", "-np", "2", "--controller", controller]
        done = subprocess.run(
            [*command, str(tmp_path / "train.py"), *map(str, args)],
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return start


def test_a_killed_job_resumes(train, tmp_path):
    """R23: a rank is killed in epoch 4; started again the job ends as one that was never killed."""
    code, whole, err = train(RESUMABLE, tmp_path / "whole")
    assert code == 0, err
    code, _, err = train(RESUMABLE, tmp_path / "cut", "kill")
    assert code == 137
    assert "rank 1" in err
    code, resumed, err = train(RESUMABLE, tmp_path / "cut")
    assert code == 0, err
    for out, epochs in ((whole, "[0, 1, 2, 3, 4, 5]"), (resumed, "[4, 5]")):
        ranks = [line.removeprefix("[1] ") for line in out.splitlines() if "epochs" in line]
        assert len(set(ranks)) == 1 and len(ranks) == 2
        assert f"epochs {epochs} iterations 24" in ranks[0]
    sums = [np.array(json.loads(out.split("sums ")[1].splitlines()[0])) for out in (whole, resumed)]
    np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-6)


@needs_mpi
def test_adasum_over_mpi(train):
    """Of one step's gradients, by the formula of Adasum (Maleki et al. 2020) in numpy."""
    script = TRAINING.format(options={"reduce_op": "adasum"}, optimizer="SGD(1.0)") + textwrap.dedent("""
        before = model.get_weights()
        model.fit(x[:8], y[:8], batch_size=8, epochs=1, shuffle=False, verbose=0)
        after = model.get_weights()
        plain = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(1)])
        plain.compile(keras.optimizers.SGD(1.0), "mse")
        moved = []
        for half in (slice(0, 4), slice(4, 8)):
            plain.set_weights(before)
            plain.fit(x[half], y[half], batch_size=4, epochs=1, shuffle=False, verbose=0)
            moved.append(np.concatenate([(p - b).ravel() for p, b in zip(plain.get_weights(), before)]))
        a, b = moved
        wanted = a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b))
        got = np.concatenate([(p - b).ravel() for p, b in zip(after, before)])
        print("difference", float(np.abs(got - wanted).max()), "of", float(np.abs(wanted).max()))
    """)
    code, out, err = train(script, controller="mpi")
    assert code == 0, err
    ranks = [line.split() for line in out.splitlines() if "difference" in line]
    assert len(ranks) == 2
    for *_, difference, _, largest in ranks:
        assert float(difference) < 1e-5 < float(largest)
