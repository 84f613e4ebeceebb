"""Reading this process's place from the environment."""

import pytest

from tfdist.cluster import LAUNCHERS, World

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def place(world):
    return (world.rank, world.size, world.local_rank, world.local_size)


def test_no_launcher_is_a_world_of_one():
    world = World.from_env({"PATH": "/bin"})
    assert place(world) == (0, 1, 0, 1)
    assert world.is_chief
    assert world.host


@pytest.mark.parametrize("env", [HOROVOD, OPEN_MPI, MPICH])
def test_each_launcher(env):
    world = World.from_env(env)
    assert place(world) == (3, 4, 1, 2)
    assert not world.is_chief


def test_horovodrun_is_believed_before_mpi():
    both = {**OPEN_MPI, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
    assert place(World.from_env(both)) == (0, 1, 0, 1)


def test_without_local_variables_one_host_is_assumed():
    assert place(World.from_env({"PMI_RANK": "2", "PMI_SIZE": "3"})) == (2, 3, 2, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"HOROVOD_RANK": "two"}, ["HOROVOD_RANK", "'two'", "from 0 to 3"]),
        ({"HOROVOD_RANK": ""}, ["HOROVOD_RANK", "''"]),
        ({"HOROVOD_RANK": "4"}, ["HOROVOD_RANK", "'4'", "from 0 to 3"]),
        ({"HOROVOD_RANK": "-1"}, ["HOROVOD_RANK", "'-1'"]),
        ({"HOROVOD_RANK": None}, ["HOROVOD_RANK is not set", "unset HOROVOD_SIZE"]),
        ({"HOROVOD_SIZE": None}, ["HOROVOD_SIZE is not set", "integer >= 1"]),
        ({"HOROVOD_SIZE": "0"}, ["HOROVOD_SIZE", "'0'", "integer >= 1"]),
        ({"HOROVOD_LOCAL_SIZE": "5"}, ["HOROVOD_LOCAL_SIZE", "'5'", "from 1 to 4"]),
        ({"HOROVOD_LOCAL_RANK": "2"}, ["HOROVOD_LOCAL_RANK", "'2'", "from 0 to 1"]),
        ({"HOROVOD_LOCAL_SIZE": None}, ["HOROVOD_LOCAL_SIZE is not set"]),
    ],
)
def test_malformed_variables_are_named(change, words):
    env = {k: v for k, v in {**HOROVOD, **change}.items() if v is not None}
    with pytest.raises(ValueError, match="started|start the process") as error:
        World.from_env(env)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "numbers", [(0, 0, 0, 1), (2, 2, 0, 1), (0, 2, 0, 3), (0, 2, 1, 1), (0, 2, 0, 0)]
)
def test_contradicting_numbers(numbers):
    with pytest.raises(ValueError, match=r"World: \w+ is -?\d+, expected"):
        World(*numbers, host="h")


def test_families_share_no_variable():
    names = [name for launcher in LAUNCHERS for name in launcher.names]
    assert len(set(names)) == len(names)
