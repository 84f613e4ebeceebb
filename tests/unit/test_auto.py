"""Which strategy an environment asks for."""

from __future__ import annotations

import json

import pytest

from tfdist.strategies.auto import choose

RANKS = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def workers(count, job="worker"):
    cluster = {"worker": [f"w{i}:1" for i in range(count)]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})}


@pytest.mark.parametrize(
    ("env", "kind", "why"),
    [
        ({}, "one process", "neither"),
        ({"TF_CONFIG": "{}"}, "one process", "neither"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, "one process", "neither"),
        (RANKS, "ring", "2 ranks"),
        (TF_CONFIG, "parameter server", "2 workers and 1 ps"),
        ({**RANKS, **TF_CONFIG}, "ring", "2 ranks"),
        ({**TF_CONFIG, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "parameter server", "2 workers"),
        (workers(2), "ring", "TF_CONFIG names 2 workers"),
        (workers(1), "one process", "neither"),
        (workers(2, "evaluator"), "ring", "without ps"),
        (SLURM, "ring", "Slurm names 2 tasks"),
        ({**SLURM, **TF_CONFIG}, "parameter server", "1 ps"),
    ],
)
def test_the_first_that_applies(env, kind, why):
    found, because = choose(env)
    assert found == kind
    assert why in because


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="TF_CONFIG"):
        choose({"TF_CONFIG": "{"})
    no_chief = {"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    with pytest.raises(ValueError, match=r"has 0 chief.*1 chief, 1 worker or more"):
        choose({"TF_CONFIG": json.dumps(no_chief)})
    with pytest.raises(ValueError, match="SLURM_PROCID is '5'"):
        choose({**SLURM, "SLURM_PROCID": "5"})
