"""One plan on all ranks, and rank 0's error on all of them: threads as ranks."""

import keras
import pytest

from tfdist.comm.threaded import Threaded
from tfdist.split.network import Network
from tfdist.split.planning import wishes
from tfdist.trainers.hybrid import agreed_plan


def agreed(group, layers, balance):
    network = Network(keras.Sequential([keras.Input((4,)), *layers]))
    devices = [f"/host{group.rank}/GPU:{i}" for i in range(2)]
    return network, agreed_plan(group, network, wishes(devices, balance, 2, "1f1b", False, None, None))


def test_rank_0_plans_and_the_others_know_it_by_their_own_names():
    def work(group):
        # As Keras names the layers of a process that has built others before.
        layers = [keras.layers.Dense(4, name=f"dense_{10 * group.rank + i}") for i in range(4)]
        network, plan = agreed(group, layers, [3, 1] if group.rank == 0 else [1, 3])
        assert plan.model == network.name
        return [(stage.device, stage.operations) for stage in plan.stages], network.names

    found = Threaded.run(2, work)
    assert found[0][1] != found[1][1]
    for stages, names in found:
        assert stages == [(0, tuple(names[:3])), (1, tuple(names[3:]))]


def test_its_error_is_everybodys():
    def work(group):
        with pytest.raises(ValueError, match="2 operations cannot be cut into|add up to the model's 2 operations"):
            agreed(group, [keras.layers.Dense(4), keras.layers.ReLU()], [3, 1] if group.rank == 0 else [1, 1])

    Threaded.run(2, work)


def test_models_that_differ():
    def work(group):
        last = keras.layers.ReLU() if group.rank else keras.layers.Dense(4)
        with pytest.raises(ValueError, match=r"different operations on each rank: rank 0 \(host0\): \['dense', "):
            agreed(group, [keras.layers.Dense(4), last], [1, 1])

    Threaded.run(2, work)
