"""Slurm's variables: what is read and what is refused (tensorflow #56894, #36094)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.slurm import STEP
from tfdist import slurm


def test_a_task_of_a_step():
    step = slurm.read(STEP)
    assert (step.rank, step.size, step.local_rank, step.node) == (3, 5, 1, 1)
    assert step.nodes == ("gpu01", "gpu02", "login")
    assert step.counts == (2, 2, 1)
    assert step.port in slurm.PORTS


def test_tasks_of_a_step_compute_one_port_and_steps_different_ones():
    ports = {slurm.read({**STEP, "SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8
    assert slurm.read({**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).port in ports


def test_a_batch_script_is_no_step():
    """There the job's variables are set, and one process runs."""
    batch = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0"}
    assert slurm.read(batch) is None
    assert slurm.read({}) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[1,4-5]x,m", ["n1x", "n4x", "n5x", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-b.c[0-1]", ["a-b.c0", "a-b.c1"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert list(slurm.expand(text)) == names


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_repetitions_are_written_out(numbers):
    groups, i = [], 0
    while i < len(numbers):
        j = i
        while j < len(numbers) and numbers[j] == numbers[i]:
            j += 1
        groups.append(f"{numbers[i]}(x{j - i})" if j - i > 1 else str(numbers[i]))
        i = j
    assert list(slurm.repeat(",".join(groups))) == numbers


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SLURM_PROCID", None, "is not set, expected an integer from 0 to 4"),
        ("SLURM_PROCID", "5", "is '5', expected an integer from 0 to 4"),
        ("SLURM_PROCID", "-1", "is '-1', expected an integer from 0 to 4"),
        ("SLURM_PROCID", "one", "is 'one', expected an integer from 0 to 4"),
        ("SLURM_STEP_NUM_TASKS", "0", "is '0', expected an integer >= 1"),
        ("SLURM_STEP_NUM_TASKS", "6", "numbers with the sum 6, as SLURM_STEP_NUM_TASKS says"),
        ("SLURM_NODEID", "3", "is '3', expected an integer from 0 to 2"),
        ("SLURM_LOCALID", "2", "is '2', expected an integer from 0 to 1"),
        ("SLURM_JOB_ID", "", "is '', expected an integer"),
        ("SLURM_STEP_NODELIST", None, "is not set"),
        ("SLURM_STEP_NODELIST", "gpu[01-02]", "3 names, as SLURM_STEP_TASKS_PER_NODE='2(x2),1' has numbers"),
        ("SLURM_STEP_NODELIST", "gpu[01-", "a list of hosts"),
        ("SLURM_STEP_NODELIST", "gpu[2-1],a", "ranges such as"),
        ("SLURM_STEP_NODELIST", "a,,b", "a list of hosts"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(y2)", "numbers such as '2(x3),1'"),
        ("SLURM_STEP_TASKS_PER_NODE", None, "is not set"),
    ],
)
def test_what_is_wrong_is_said(name, value, expected):
    env = {k: v for k, v in {**STEP, name: value}.items() if v is not None}
    with pytest.raises(ValueError, match=r"^SLURM_") as error:
        slurm.read(env)
    assert expected in str(error.value)
    assert "srun" in str(error.value)
