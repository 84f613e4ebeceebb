"""Which strategy an environment asks for."""

from __future__ import annotations

import json

import pytest

from tfdist.strategies.auto import choose

RANKS = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})}


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
    ],
)
def test_the_first_that_applies(env, kind, why):
    found, because = choose(env)
    assert found == kind
    assert why in because


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="TF_CONFIG"):
        choose({"TF_CONFIG": "{"})
    workers = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
    with pytest.raises(ValueError, match=r"1 chief.*Workers alone are for ModelParallelStrategy"):
        choose({"TF_CONFIG": json.dumps(workers)})
