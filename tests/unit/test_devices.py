"""The choice of a GPU, over lists of names; and its claim, on a fake of `tf.config`."""

from dataclasses import dataclass

import pytest

from tfdist.cluster import World
from tfdist.devices import Wish, choose, choose_gpu, choose_several, claim, claim_several

TWO = ["GPU:0", "GPU:1"]


def world(local_rank=0, local_size=2, rank=None, size=None):
    rank = local_rank if rank is None else rank
    return World(rank, size or local_size, local_rank, local_size, "node7")


@pytest.mark.parametrize("required", [True, False])
def test_each_local_rank_gets_its_own(required):
    assert [choose_gpu(TWO, r, 2, required) for r in range(2)] == [0, 1]


def test_more_gpus_than_ranks():
    assert [choose_gpu(["a", "b", "c", "d"], r, 2, False) for r in range(2)] == [0, 1]


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
def test_too_few_means_the_cpu_for_all(gpus):
    assert [choose_gpu(gpus, r, 2, False) for r in range(2)] == [None, None]


@pytest.mark.parametrize(("gpus", "seen"), [([], "none"), (["GPU:0"], "GPU:0")])
def test_too_few_and_required(gpus, seen):
    with pytest.raises(ValueError, match=f"local rank 0 of 2 .* {len(gpus)} are visible .*{seen}"):
        choose_gpu(gpus, 0, 2, True)


def test_the_error_names_rank_and_host():
    with pytest.raises(ValueError, match="rank 5 on node7: local rank 1 of 2"):
        choose(["GPU:0"], world(1, 2, rank=5, size=6), Wish("gpu"))


def test_wishes():
    assert Wish.from_env({}) == Wish("auto")
    assert Wish.from_env({"TFDIST_DEVICE": "GPU"}) == Wish("gpu")
    assert Wish.from_env({"TFDIST_DEVICE": "gpu:3"}) == Wish("gpu", 3)
    assert choose(TWO, world(1), Wish("cpu")) is None
    # Each rank is shown one GPU of its own: the local rank says nothing about it.
    assert [choose(["GPU:0"], world(r), Wish("gpu", 0)) for r in range(2)] == [0, 0]


@pytest.mark.parametrize("text", ["tpu", "gpu:", "gpu:x", "cpu:0", "auto:1", ""])
def test_unknown_wishes_list_the_known(text):
    with pytest.raises(ValueError, match=r"TFDIST_DEVICE .*expected one of: auto, gpu, gpu:N, cpu"):
        Wish.from_env({"TFDIST_DEVICE": text})


def test_a_wish_for_a_missing_gpu():
    with pytest.raises(ValueError, match=r"rank 0 on node7: TFDIST_DEVICE=gpu:2 .*GPU:0.*GPU:1"):
        choose(TWO, world(), Wish("gpu", 2))


@dataclass(frozen=True)
class Gpu:
    name: str


class FakeConfig:
    """`tf.config` with GPUs; `started` refuses changes as TensorFlow does."""

    def __init__(self, count, started=False):
        self.gpus = [Gpu(f"GPU:{i}") for i in range(count)]
        self.visible = list(self.gpus)
        self.growth = set()
        self.started = started
        self.experimental = self

    def list_physical_devices(self, device_type):
        assert device_type == "GPU"
        return list(self.gpus)

    def get_visible_devices(self, device_type):
        return list(self.visible)

    def set_visible_devices(self, devices, device_type):
        self._refuse()
        self.visible = devices

    def get_memory_growth(self, gpu):
        return gpu in self.growth

    def set_memory_growth(self, gpu, on):
        self._refuse()
        self.growth.add(gpu)

    def _refuse(self):
        if self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")


def test_claim_shows_one_gpu_with_memory_growth():
    config = FakeConfig(2)
    assert claim(world(1), {}, config) == "GPU:1"
    assert config.visible == [Gpu("GPU:1")]
    assert config.growth == {Gpu("GPU:1")}


def test_claim_twice_after_the_start_changes_nothing():
    config = FakeConfig(2)
    claim(world(1), {}, config)
    config.started = True
    assert claim(world(1), {}, config) == "GPU:1"


def test_claim_the_cpu_hides_all():
    config = FakeConfig(1)
    assert claim(world(1), {}, config) is None
    assert config.visible == []


def test_claim_without_gpus_touches_nothing():
    assert claim(world(), {}, FakeConfig(0, started=True)) is None
    with pytest.raises(ValueError, match="0 are visible"):
        claim(world(), {"TFDIST_DEVICE": "gpu"}, FakeConfig(0))


def test_claim_too_late():
    words = "rank 1 on node7: TensorFlow has started .*before the first"
    with pytest.raises(RuntimeError, match=words):
        claim(world(1), {}, FakeConfig(2, started=True))


def test_a_single_rank_may_come_late():
    assert claim(World(0, 1, 0, 1, "h"), {}, FakeConfig(2, started=True)) == "GPU:0"


def names(count):
    return [f"GPU:{i}" for i in range(count)]


@pytest.mark.parametrize("per_rank", [2, 3])
def test_several_a_rank_are_dealt_out_in_turn(per_rank):
    chosen = [choose_several(names(13), world(r, 4), Wish("auto"), per_rank) for r in range(4)]
    assert [i for mine in chosen for i in mine] == list(range(4 * per_rank))
    assert {len(mine) for mine in chosen} == {per_rank}
    # It goes by the place on the host.
    assert choose_several(names(13), world(1, 4, rank=9, size=12), Wish("gpu"), per_rank) == chosen[1]


def test_several_logical_cpus_where_there_is_no_gpu_or_on_request():
    assert choose_several([], world(), Wish("auto"), 2) is None
    assert choose_several(names(4), world(), Wish("cpu"), 2) is None


@pytest.mark.parametrize(("there", "wish"), [(3, Wish("auto")), (3, Wish("gpu")), (0, Wish("gpu"))])
def test_too_few_for_all_ranks_names_both_numbers(there, wish):
    with pytest.raises(ValueError, match=f"2 ranks with 2 GPUs each need 4 on this host, and {there} are visible"):
        choose_several(names(there), world(1), wish, 2)


def test_each_rank_is_shown_its_own():
    assert [choose_several(names(2), world(r), Wish("gpu", 0), 2) for r in range(2)] == [[0, 1], [0, 1]]
    assert choose_several(names(4), world(), Wish("gpu", 2), 2) == [2, 3]
    with pytest.raises(ValueError, match="gpu:3 and 2 GPUs a rank need 5, and 4 are visible"):
        choose_several(names(4), world(), Wish("gpu", 3), 2)


def test_claim_several_shows_them_with_memory_growth():
    config = FakeConfig(5)
    assert claim_several(world(1), 2, {}, config) == ["GPU:2", "GPU:3"]
    assert config.visible == [Gpu("GPU:2"), Gpu("GPU:3")]
    assert config.growth == {Gpu("GPU:2"), Gpu("GPU:3")}
    config.started = True
    assert claim_several(world(1), 2, {}, config) == ["GPU:2", "GPU:3"]
    with pytest.raises(RuntimeError, match="cannot take GPU:0, GPU:1 any more"):
        claim_several(world(0), 2, {}, config)


def test_claim_several_cpus_hides_all():
    config = FakeConfig(4)
    assert claim_several(world(), 2, {"TFDIST_DEVICE": "cpu"}, config) == []
    assert config.visible == []
    assert claim_several(world(), 2, {}, FakeConfig(0, started=True)) == []
