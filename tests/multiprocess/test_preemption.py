"""Jobs with a `tfdist.Checkpoint` that get a signal, and go on in a run after it, against plain Keras."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.cluster import QUIET

ROOT = pathlib.Path(__file__).parents[2]

TRAINING = """
import json, os, signal, sys
import keras, numpy as np, tfdist
strategy = tfdist.{strategy}
keras.utils.set_random_seed(7)
with strategy.scope():
    model = strategy.distribute(keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.Adam(0.01), "mse")
random = np.random.default_rng(5)
x, y = random.normal(size=(64, 6)).astype("float32"), random.normal(size=(64, 1)).astype("float32")

class Data(keras.utils.PyDataset):  # with processes of its own, which a signal must not end before the step is over
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return x[index * 8:index * 8 + 8], y[index * 8:index * 8 + 8]

class Signal(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        first = os.environ.get("HOROVOD_RANK", "0") == "0"
        if (self.epoch, batch, sys.argv[1]) == (1, 2, "launcher") and first:
            with open("ready", "w") as pipe:
                pipe.write("now")
            open("told").close()  # a named pipe too: until the signal is on its way
        if (self.epoch, batch, sys.argv[1]) == (2, 2, "process") and (not first or "HOROVOD_RANK" not in os.environ):
            os.kill(os.getpid(), signal.SIGUSR1)

if __name__ == "__main__":
    history = model.fit(Data(workers=2, use_multiprocessing=True), epochs=4, shuffle=False, verbose=0,
                        callbacks=[Signal(), tfdist.Checkpoint("kept")])
    print("sums", json.dumps([float(np.sum(v)) for v in model.optimizer.variables + model.variables]))
    print("epochs", history.epoch)
"""


def job(tmp_path, who, *options):
    """`tfdist run`, or without options the script alone; (exit code, stdout, stderr)."""
    command = [*(["-m", "tfdist.cli.main", "run", *options] if options else []), "train.py", who]
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if who == "launcher":
        assert (tmp_path / "ready").read_text() == "now"
        process.send_signal(signal.SIGTERM)
        (tmp_path / "told").write_text("")
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RingAllReduceStrategy()", ["-np", "2"]),
        ("ParameterServerStrategy(start_seconds=100)", ["--ps", "1", "--workers", "1"]),
    ],
    ids=["ring", "ps"],
)
def test_a_preempted_job_leaves_with_75_and_goes_on(tmp_path, name, options):
    """SIGTERM to the launcher; then, in the next epoch, SIGUSR1 to one process; then it goes on to its end.

    The ring on one rank, without a launcher. The weights are those of plain Keras.
    """
    (tmp_path / "train.py").write_text(TRAINING.replace("{strategy}", name))
    for pipe in ("ready", "told"):
        os.mkfifo(tmp_path / pipe)
    code, out, err = job(tmp_path, "launcher", *options)
    assert code == 75, out + err
    place = re.search(r"leaving with exit code 75 \(SIGTERM\); (kept/\d+-\d+) is where to go on", out)
    assert place and place[1] >= "kept/000001-000000003", out
    assert "left with exit code 75: start the job again to go on" in err
    assert [p.name for p in (tmp_path / "kept").iterdir()] == [place[1].removeprefix("kept/")]
    code, out, err = job(tmp_path, "process", *options)
    assert code == 75, out + err
    assert f"going on from {place[1]}: epoch 2, step" in out
    place = re.search(r"leaving with exit code 75 \(.*\); (kept/000002-\d+) is where to go on", out)
    assert place, out
    code, out, err = job(tmp_path, "nobody", *([] if "Ring" in name else options))
    assert code == 0, err
    assert f"going on from {place[1]}" in out and "epochs [2, 3]" in out
    assert not (tmp_path / "kept").exists()
    plain = {}
    exec(TRAINING.replace("tfdist.{strategy}", "None").replace("strategy.distribute", "").replace(
        "with strategy.scope():", "if True:").replace("__main__", ""), plain)  # fmt: skip
    plain["model"].fit(plain["x"], plain["y"], batch_size=8, epochs=4, shuffle=False, verbose=0)
    variables = plain["model"].optimizer.variables + plain["model"].variables
    sums = json.loads(re.search(r"^sums (.*)", out, re.M)[1])
    np.testing.assert_allclose(sums, [float(np.sum(v)) for v in variables], rtol=1e-4, atol=1e-5)
