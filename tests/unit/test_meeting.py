"""Where ranks meet that no Horovod launcher has started."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.slurm import STEP
from tfdist import meeting
from tfdist.tf_config import Cluster, Task

WORKERS = {"worker": ["a:2222", "b:2222", "a:2223"]}


def config(cluster, job="worker", index=0, **env):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}), **env}


def test_workers_alone_are_a_ring():
    met = meeting.from_env(config(WORKERS, index=2))
    assert (met.rank, met.size, met.local_rank, met.local_size) == (2, 3, 1, 2)
    assert (met.cross_rank, met.cross_size) == (0, 1)
    assert (met.address, met.host) == ("a:2222", "a")
    assert met.me == "rank 2 (worker/2 of TF_CONFIG)"


@pytest.mark.parametrize("name", ["chief", "master"])
def test_a_chief_is_rank_0(name):
    cluster = {name: ["c:1"], "worker": ["d:1"]}
    assert meeting.from_env(config(cluster, name)).rank == 0
    met = meeting.from_env(config(cluster))
    assert (met.rank, met.size, met.address) == (1, 2, "c:1")


def test_loopback_addresses_are_one_host():
    met = meeting.from_env(config({"worker": ["localhost:1", "127.0.0.1:2"]}, index=1))
    assert (met.local_rank, met.local_size, met.host) == (1, 2, "localhost")


@pytest.mark.parametrize(
    "env",
    [
        {},
        config({"worker": ["a:1"]}),
        config({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}),
        config(WORKERS, HOROVOD_RANK="1", HOROVOD_SIZE="2"),
        config(WORKERS, "evaluator"),
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "a",
         "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
        {**STEP, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**STEP, **config({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})},
    ],
)  # fmt: skip
def test_nobody_to_meet(env):
    assert meeting.from_env(env) is None


def test_only_a_rings_evaluator_watches():
    assert meeting.watches(config(WORKERS, "evaluator"))
    assert not meeting.watches(config(WORKERS))
    assert not meeting.watches(config({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "evaluator"))
    assert not meeting.watches({})


def test_a_step_of_slurm_is_a_ring():
    met = meeting.from_env(STEP)
    assert (met.rank, met.size, met.local_rank, met.local_size) == (3, 5, 1, 2)
    assert (met.cross_rank, met.cross_size, met.host) == (1, 2, "gpu02")
    assert met.address.startswith("gpu01:")


def test_variables_that_srun_sets_for_mpich_do_not_count():
    assert meeting.from_env({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).rank == 3
    assert meeting.from_env({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}) is None  # mpiexec's own


def test_the_address_can_be_given():
    assert meeting.from_env({**STEP, "TFDIST_RENDEZVOUS": "gw:99"}).address == "gw:99"
    for wrong in ("gw", "gw:", ":1", "gw:0", "gw:x", "gw:70000"):
        with pytest.raises(ValueError, match="TFDIST_RENDEZVOUS is .*expected"):
            meeting.from_env({**STEP, "TFDIST_RENDEZVOUS": wrong})


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_places_on_hosts_are_those_that_horovod_would_count(hosts):
    """Against a count by hand: ranks of a host in order, hosts of a local rank in order."""
    cluster = Cluster(None, tuple(f"{host}:{port}" for port, host in enumerate(hosts, 1)))
    mets = [meeting.of_cluster(cluster, Task("worker", i)) for i in range(len(hosts))]
    for rank, met in enumerate(mets):
        mates = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        assert (met.local_rank, met.local_size) == (mates.index(rank), len(mates))
        level = [m.host for m in mets if m.local_rank == met.local_rank]
        assert (met.cross_rank, met.cross_size) == (level.index(met.host), len(level))
