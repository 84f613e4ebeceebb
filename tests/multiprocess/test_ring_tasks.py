"""The ring without a launcher: from TF_CONFIG, and from Slurm's variables."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers import several
from tfdist.launch.ports import free_addresses

SCRIPT = """
import zlib
import keras, numpy as np, tfdist

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
y = x.sum(1, keepdims=True)
strategy = tfdist.auto_strategy()
with strategy.scope():
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = strategy.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
total = float(sum(np.abs(w).sum() for w in model.get_weights()))
print(f"{tfdist.rank()} of {tfdist.size()}, local {tfdist.local_rank()}: {total:.5f}", flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def alone(script):
    """What one process prints for the weights."""
    (ended,) = several.run(script, [{}])
    assert ended.code == 0, ended.err
    return ended.out.split(": ")[-1].strip()


def configs(cluster, tasks):
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": j, "index": i}})} for j, i in tasks]


def test_tf_config_as_tfjob_writes_it(script, alone):
    """A master, a worker and an evaluator: two ranks, which train as one process does; the third has no part."""
    master, worker, evaluator = free_addresses(3)
    cluster = {"master": [master], "worker": [worker], "evaluator": [evaluator]}
    tasks = [("worker", 0), ("evaluator", 0), ("master", 0)]
    ended = several.run(script, configs(cluster, tasks))
    assert [e.code for e in ended] == [0, 0, 0], [e.err for e in ended]
    assert ended[2].out.splitlines()[0] == "tfdist: ring, because TF_CONFIG names 2 workers"
    assert ended[2].out.splitlines()[-1] == f"0 of 2, local 0: {alone}"
    assert ended[0].out.splitlines()[-1] == f"1 of 2, local 1: {alone}"
    assert ended[1].out == "tfdist: an evaluator has no part in a ring, whose ranks validate together; it ends.\n"


def test_slurm(script, alone):
    """`srun -n2 python train.py`, by the variables that it sets."""
    (address,) = free_addresses(1)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "TFDIST_RENDEZVOUS": address,
        "PMI_SIZE": "2",
    }
    envs = [{**step, "SLURM_PROCID": r, "SLURM_LOCALID": r, "PMI_RANK": r} for r in "10"]
    ended = several.run(script, envs)
    assert [e.code for e in ended] == [0, 0], [e.err for e in ended]
    assert ended[1].out.splitlines()[0] == "tfdist: ring, because Slurm names 2 tasks"
    assert ended[0].out.splitlines()[-1] == f"1 of 2, local 1: {alone}"


def test_one_task_only(script):
    """P14, L7: nobody else comes."""
    cluster = {"worker": free_addresses(2)}
    env = {**configs(cluster, [("worker", 1)])[0], "TFDIST_START_DEADLINE": "1"}
    (ended,) = several.run(script, [env], deadline=60)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert f"rank 0 (worker/0) at {cluster['worker'][0]} gave no answer within 1 s (Connection refused)" in last
