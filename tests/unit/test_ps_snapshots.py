"""Weights for the evaluator: their pieces, and what chief and evaluator say to each other, without a cluster."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.queues import Queues
from tfdist.ps import evaluator, offers, snapshots
from tfdist.ps.snapshots import ALIVE, NOTHING, Collected, Header
from tfdist.tf_config import Cluster, Task
from tfdist.trainers.ps_evaluator import evaluation, line

ARRAYS = [
    np.arange(6, dtype="float32").reshape(2, 3),
    np.array(7, "int64"),
    np.array([True, False, True]),
    np.zeros((0, 4), "float32"),
    np.arange(5).astype(ml_dtypes.bfloat16),
]
CLUSTER = Cluster("127.0.0.1:1", workers=("127.0.0.1:3",), ps=("127.0.0.1:2",))


class TestPieces:
    @pytest.mark.parametrize("size", [1, 7, 24, 45, 100])
    def test_arrays_come_out_as_they_went_in(self, size):
        data = snapshots.flat(ARRAYS)
        assert data.nbytes == 24 + 8 + 3 + 0 + 10
        collected, result = Collected(5), None
        pieces = list(snapshots.cut(data, size))
        assert all(len(piece) <= size for _, piece in pieces)
        for start, piece in pieces:
            assert result is None
            result = collected.add(Header(5, 1, 2, start, len(data), 0), piece)
        for one, other in zip(snapshots.shaped(result, ARRAYS), ARRAYS, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)

    def test_what_is_left_of_earlier_tries_counts_for_nothing(self):
        collected = Collected(5)
        parts = [np.full(4, i, np.uint8) for i in range(2)]
        assert collected.add(Header(4, 1, 2, 0, 8, 0), parts[1]) is None  # another's
        assert collected.add(Header(5, 1, 2, 4, 8, 0), parts[1]) is None  # without its first
        assert collected.add(Header(5, 1, 2, 0, 8, 0), parts[1]) is None  # of a try that was given up
        assert collected.add(Header(5, 1, 2, 0, 8, 0), parts[0]) is None
        assert collected.add(Header(5, 1, 2, 4, 8, 0), parts[1]).tolist() == [0] * 4 + [1] * 4

    def test_nothing_is_one_empty_piece(self):
        (piece,) = snapshots.cut(snapshots.flat([]))
        assert len(Collected(5).add(Header(5, 1, 2, 0, 0, 1), piece[1])) == 0

    def test_layouts(self):
        assert snapshots.layout(ARRAYS) == snapshots.layout([np.zeros_like(a) for a in ARRAYS])
        assert snapshots.layout(ARRAYS) != snapshots.layout(ARRAYS[::-1])
        assert snapshots.layout(ARRAYS) != snapshots.layout([a.astype("float16") for a in ARRAYS])


class Weight:
    def __init__(self, value):
        self.value = np.float32(value)

    def numpy(self):
        return np.full(3, self.value, "float32")


class Model:
    """As much of a model as is needed."""

    def __init__(self):
        self.weights = [Weight(0)]
        self.optimizer = self
        self.iterations = 0

    def train(self):
        self.iterations += 10
        self.weights = [Weight(self.iterations)]


@pytest.fixture
def queues(monkeypatch):
    """Both ends, in this process; the chief's patience is short."""
    queues = Queues()
    monkeypatch.setattr(offers, "Queues", lambda: queues)
    monkeypatch.setattr(evaluator, "Exchange", lambda address: queues)
    monkeypatch.setattr(evaluator, "LOOK", 0.0)
    monkeypatch.setattr(offers, "SILENT", 0.2)
    monkeypatch.setattr(evaluator, "ALIVE_EVERY", 0.0)
    return queues


LIKE = [np.zeros(3, "float32")]


def receiver():
    return evaluator.Receiver(CLUSTER, Task("evaluator", 0))


class TestWords:
    def test_what_was_asked_for_is_sent_once(self, queues):
        chief, model = offers.Offers(False), Model()
        chief.offer(model)
        assert not queues.weights  # nobody asked
        queues.when_idle = [model.train, lambda: chief.offer(model), lambda: chief.offer(model)]
        found = receiver().next(LIKE)
        assert (found.updates, found.last, found.arrays[0].tolist()) == (10, False, [10.0] * 3)
        chief.offer(model)
        assert not queues.weights

    def test_the_last_are_evaluated_before_the_chief_leaves(self, queues):
        chief, model, mine = offers.Offers(False), Model(), receiver()
        queues.when_idle = [lambda: chief.offer(model)]
        mine.next(LIKE)
        model.train()

        def follow():
            found = mine.next(LIKE)
            assert (found.updates, found.last) == (10, True)
            mine.evaluated()

        queues.on_asked = [queues.in_thread(follow)]
        chief.finish()
        queues.join()
        assert chief._evaluated

    def test_the_last_are_not_sent_again(self, queues):
        chief, model, mine = offers.Offers(False), Model(), receiver()
        queues.when_idle = [lambda: chief.offer(model)]
        mine.next(LIKE)
        queues.when_idle = [chief.finish]
        found = mine.next(LIKE)
        assert found.last
        assert found.arrays is None

    def test_a_new_evaluator_gets_all_of_the_last(self, queues):
        chief, model = offers.Offers(False), Model()
        queues.when_idle = [lambda: chief.offer(model)]
        receiver().next(LIKE)
        queues.when_idle = [chief.finish]
        assert receiver().next(LIKE).arrays[0].tolist() == [0.0] * 3

    def test_nobody_is_waited_for_without_need(self, queues, capsys):
        offers.Offers(False).finish()  # nobody was ever heard of
        chief = offers.Offers(True)
        receiver().decline()
        chief.finish()
        assert capsys.readouterr().out == ""
        queues.asked_numbers = [ALIVE]
        chief.finish()
        assert "the evaluator did not end in 0 s; the chief leaves" in capsys.readouterr().out

    def test_signs_of_life(self, queues):
        mine = receiver()
        mine.pulse()
        mine.pulse()
        assert queues.asked_numbers == [ALIVE]  # another one would say no more
        mine.decline()
        assert queues.asked_numbers == [ALIVE, NOTHING]

    def test_the_chiefs_end(self, queues):
        queues.ends["done"] = 1
        assert receiver().next(LIKE) is None
        queues.ends["failed"] = 1
        with pytest.raises(SystemExit, match="1"):
            receiver().pulse()

    def test_only_the_first_model_is_offered(self, queues):
        chief, model = offers.Offers(False), Model()
        chief.offer(model)
        queues.asked_numbers = [1 << snapshots.WHO]
        chief.offer(Model())
        assert not queues.weights
        chief.offer(model)
        assert len(queues.weights) == 1

    def test_another_model_is_an_error(self, queues):
        chief, model = offers.Offers(False), Model()
        queues.when_idle = [lambda: chief.offer(model)]
        with pytest.raises(ValueError, match="12 bytes, expected 4. Run the same script"):
            receiver().next([np.zeros(1, "float32")])


class TestEvaluation:
    CALL = dict.fromkeys(
        ["x", "y", "sample_weight", "validation_data", "validation_split", "validation_batch_size", "batch_size"]
        + ["validation_steps"]
    )

    def test_arguments(self):
        x, y = np.arange(10), np.arange(10) + 1
        assert evaluation(self.CALL) is None
        found = evaluation({**self.CALL, "validation_data": (x, y), "batch_size": 4, "validation_steps": 2})
        assert found["x"] is x
        assert found["y"] is y
        assert (found["batch_size"], found["steps"], found["sample_weight"]) == (4, 2, None)
        call = {**self.CALL, "x": x, "y": y, "validation_split": 0.3, "batch_size": 4, "validation_batch_size": 5}
        found = evaluation(call)
        assert list(found["x"]) == [7, 8, 9]
        assert found["batch_size"] == 5

    def test_line(self):
        found = {"accuracy": 0.97, "f1": np.array([0.5, 1.0]), "loss": 0.00012345}
        assert line("evaluator/0", 1240, found) == (
            "evaluator/0: after 1,240 updates: loss 0.0001234, accuracy 0.9700, f1 [0.5 1. ]"
        )
