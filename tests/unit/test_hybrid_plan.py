"""One plan on all ranks, and rank 0's error on all of them: threads as ranks."""

from types import SimpleNamespace

import pytest

from tfdist.comm.threaded import Threaded
from tfdist.trainers.hybrid import agree_on_plan


def network(*names):
    return SimpleNamespace(operations=[SimpleNamespace(name=name) for name in names])


def agreed(group, plan, *names):
    devices = [f"/host{group.rank}/GPU:{i}" for i in range(3)]
    return agree_on_plan(group, "distribute of 'm'", network(*names), devices, lambda net: plan(group, net, devices))


def test_rank_0_plans_and_each_rank_takes_its_own_devices():
    def plan(group, net, devices):
        assert group.rank == 0
        return (0, 1, 3), [devices[0], devices[2]]

    # Keras counts the layers of a process.
    got = Threaded.run(2, lambda group: agreed(group, plan, f"dense_{group.rank}", "relu", "add"))
    assert got == [((0, 1, 3), [f"/host{r}/GPU:0", f"/host{r}/GPU:2"]) for r in range(2)]


def test_its_error_is_everybodys():
    def plan(group, net, devices):
        raise ValueError("3 operations cannot be cut")

    def work(group):
        with pytest.raises(ValueError, match="3 operations cannot be cut"):
            agreed(group, plan, "a", "b", "c")

    Threaded.run(2, work)


def test_models_that_differ():
    def work(group):
        with pytest.raises(ValueError, match=r"different operations on each rank: rank 0 \(host0\): \['a', 'b0'\]"):
            agreed(group, lambda *_: ((0, 1, 2), [f"/host0/GPU:{i}" for i in range(2)]), "a", f"b{group.rank}")

    Threaded.run(2, work)
