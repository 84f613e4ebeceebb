"""`tfdist.Checkpoint` on one and two ranks, against plain Keras that nobody interrupts."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfdist
from tests.helpers import cluster
from tests.helpers.checks import Checks
from tests.helpers.cluster import QUIET
from tests.multiprocess import checkpoint_cases as cases

CHECKS = Checks(__name__)
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def strategy():
    return tfdist.RingAllReduceStrategy()


# -- one rank -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(cases.CASES))
def test_one_process(strategy, name, tmp_path):
    build, optimizer, fit, at = cases.CASES[name]
    plain = cases.straight(build, optimizer, fit)
    cases.assert_same(cases.interrupted(tmp_path / "kept", strategy, build, optimizer, fit, at), plain)


def test_dropout_goes_on_with_the_same_masks(strategy, tmp_path):
    """Seeds of layers are in no file of Keras', and arrays are shuffled with a seed that nobody has set."""
    arguments = (lambda: cases.dense(0.5), cases.adam, lambda: cases.arrays(epochs=2))
    plain = cases.straight(*arguments)
    ours = cases.interrupted(tmp_path / "kept", strategy, *arguments, [(0, 4), (1, 2)])
    cases.assert_same(ours, plain)


def test_learning_rates_of_other_callbacks_and_stopping(strategy, tmp_path):
    """What callbacks behind it change at the end of an epoch is in the checkpoint, and so is their wish to stop."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.model.stop_training = True
                checkpoint.leave()

    x, y = cases.rows()
    checkpoint = tfdist.Checkpoint(tmp_path / "kept")
    model = cases.compiled(cases.dense, cases.adam, strategy)
    with pytest.raises(SystemExit) as left:
        model.fit(x, y, epochs=5, verbose=0, callbacks=[checkpoint, cases.Twice(), Stop()])
    assert left.value.code == 75
    again = cases.compiled(cases.dense, cases.adam, strategy)
    assert again.fit(x, y, epochs=5, verbose=0, callbacks=[tfdist.Checkpoint(tmp_path / "kept")]).epoch == []
    for a, b in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert float(again.optimizer.learning_rate) == pytest.approx(0.0025)
    assert len(again.fit(x, y, epochs=2, verbose=0).epoch) == 2  # the next fit is one of its own


def test_an_order_without_a_seed_is_that_of_the_checkpoint(strategy, tmp_path):
    """Of two runs without a seed; the batches of the interrupted epoch, together, are all rows once."""
    script = """
import os, sys
import keras, numpy as np, tfdist
strategy = tfdist.RingAllReduceStrategy()
class Seen(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
    def train_step(self, data):
        print("seen", *data[0].numpy()[:, 0].astype(int).tolist())
        return super().train_step(data)
model = strategy.distribute(Seen())
model.compile("sgd", "mse", run_eagerly=True)
x = np.arange(12, dtype="float32")[:, None]
model.build((None, 1))
class Leave(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and "leave" in sys.argv:
            kept.leave()
kept = tfdist.Checkpoint("kept")
model.fit(x, x, batch_size=3, verbose=0, callbacks=[kept, Leave()])
"""
    (tmp_path / "train.py").write_text(script)
    seen = []
    for arguments, code in ((["leave"], 75), ([], 0)):
        done = subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=tmp_path, env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        seen.append([int(n) for line in re.findall(r"seen (.*)", done.stdout) for n in line.split()])
    assert [len(s) for s in seen] == [6, 6]
    assert sorted(seen[0] + seen[1]) == list(range(12))


def test_other_data_in_the_middle_of_an_epoch_is_refused(strategy, tmp_path):
    x, y = cases.rows()
    for batch, steps in ((16, 1), (8, 1), (16, 2)):
        checkpoint = tfdist.Checkpoint(tmp_path / "kept")
        model = cases.compiled(cases.dense, cases.adam, strategy, steps_per_execution=steps)
        expected, words = {
            (16, 1): (SystemExit, "75"),
            (8, 1): (ValueError, "in batches of 16, shuffle=True, but fit got arrays of 96 samples in batches of 8"),
            (16, 2): (ValueError, "at step 3 of its epoch, which is no multiple of steps_per_execution=2"),
        }[batch, steps]
        with pytest.raises(expected, match=words):
            model.fit(x, y, batch_size=batch, verbose=0, callbacks=[checkpoint, cases.At(checkpoint, 0, 2)])


def test_what_could_not_be_loaded_is_refused_at_once(strategy, tmp_path):
    x, y = cases.rows()
    kept = [tfdist.Checkpoint(tmp_path / "a"), tfdist.Checkpoint(tmp_path / "b")]
    with pytest.raises(ValueError, match="fit got 2 tfdist.Checkpoint callbacks, expected one"):
        cases.compiled(cases.dense, cases.adam, strategy).fit(x, y, callbacks=kept)
    with pytest.raises(ValueError, match=r"is for models of one of tfdist's strategies: call `model = strategy.dist"):
        cases.compiled(cases.dense, cases.adam).fit(x, y, verbose=0, callbacks=kept[:1])
    with pytest.raises(ValueError, match="seconds is 0, expected a number above 0"):
        tfdist.Checkpoint(tmp_path, seconds=0)


# -- two ranks ----------------------------------------------------------------------------------------------


@CHECKS
def two_ranks_leave_and_go_on(ring):
    """Any rank may be told; all leave together, and the weights are those of plain Keras."""
    for i, name in enumerate(list(cases.CASES)[2:]):
        build, optimizer, fit, at = cases.CASES[name]
        plain = cases.straight(build, optimizer, fit)
        told = ring.rank == i % 2
        ours = cases.interrupted(ring.path / f"kept{i}", ring.strategy, build, optimizer, fit, at, told=told)
        cases.assert_same(ours, plain)


@CHECKS
def two_ranks_are_exact_after_going_on(ring):
    """Bit by bit what two ranks have without the interruption: dropout's masks and moving statistics too."""

    def build():
        return keras.Sequential([*cases.normed().layers, keras.layers.Dropout(0.5), keras.layers.Dense(1)])

    def fit():
        return cases.arrays(epochs=3)

    def straight(callbacks):
        model = cases.compiled(build, cases.adam, ring.strategy)
        return model, model.fit(**fit(), verbose=0, callbacks=callbacks)

    class Save(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, 3):
                kept.save()

    kept = tfdist.Checkpoint(ring.path / "whole")
    whole = straight([kept, Save()])
    ours = cases.interrupted(ring.path / "cut", ring.strategy, build, cases.adam, fit, [(1, 2)])
    for a, b in zip(ours[0].variables, whole[0].variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=b.path)
    np.testing.assert_allclose(ours[1].history["loss"], whole[1].history["loss"][1:], rtol=1e-6)  # summed otherwise


@CHECKS
def a_checkpoint_by_the_clock_of_rank_0(ring):
    """Nobody is told of the end, so what is gone on from is the last one that was due."""

    class End(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    x, y = cases.rows()
    model = cases.compiled(cases.dense, cases.adam, ring.strategy)
    with pytest.raises(KeyboardInterrupt):
        # Before rank 0's own callback, which is the last, sees the epoch's end.
        model.fit(
            x, y, batch_size=16, epochs=3, verbose=0, callbacks=[tfdist.Checkpoint(ring.path / "kept", 1e-9), End()]
        )
    names = [p.name for p in (ring.path / "kept").iterdir()]
    assert len(names) == 1 and "000000-000000002" <= names[0] < "000002", names
    ring.everywhere(None)  # before the next run removes it
    ours = cases.interrupted(
        ring.path / "kept", ring.strategy, cases.dense, cases.adam, lambda: cases.arrays(epochs=3), []
    )
    cases.assert_same(ours, cases.straight(cases.dense, cases.adam, lambda: cases.arrays(epochs=3)))


@CHECKS
def ranks_that_disagree_are_told(ring):
    x, y = cases.rows()
    model = cases.compiled(cases.dense, cases.adam, ring.strategy)
    callbacks = [tfdist.Checkpoint(ring.path / "kept")] if ring.rank == 0 else []
    with pytest.raises(ValueError, match="different tfdist.Checkpoint among the callbacks on each rank"):
        model.fit(x, y, verbose=0, callbacks=callbacks)


test_two_ranks = CHECKS.tests()

SIZES = ("arrays, twice", "accumulated gradients")


def part_of(folder, strategy, place, which):
    """Trains the cases from wherever their checkpoints are until `place`, or to the end; what came out."""
    done = {}
    for name in SIZES:
        build, optimizer, fit, _ = cases.CASES[name]
        model = cases.compiled(build, optimizer, strategy)
        kept = tfdist.Checkpoint(pathlib.Path(folder) / name)
        others = [cases.At(kept, *place)] if place is not None and tfdist.rank() == which else []
        try:
            history = model.fit(**fit(), verbose=0, callbacks=[kept, *others])
        except SystemExit:
            continue
        optimizer = [v.numpy() for v in model.optimizer.variables]
        done[name] = ([v.numpy() for v in model.weights], optimizer, history.history)
    return done


def on_ranks(folder, place):
    return part_of(folder, tfdist.RingAllReduceStrategy(), place, 1)


def test_another_number_of_ranks(strategy, tmp_path):
    """1 -> 2 -> 1 ranks, and 2 -> 1 alone: the weights, slots and logs of plain Keras."""
    folder = tmp_path / "first"
    assert part_of(folder, strategy, (0, 3), 0) == {}
    shutil.copytree(folder, tmp_path / "second")
    ended = [cluster.run(on_ranks, 2, deadline=240, args=(str(tmp_path / f), p)) for f, p in
             (("first", (1, 2)), ("second", None))]  # fmt: skip
    assert ended[0] == [{}, {}]
    results = [part_of(folder, strategy, None, 0), *ended[1]]
    for name in SIZES:
        build, optimizer, fit, _ = cases.CASES[name]
        plain, history = cases.straight(build, optimizer, fit)
        for done in results:
            weights, slots, logs = done[name]
            for a, b in zip([*weights, *slots], [*plain.weights, *plain.optimizer.variables], strict=True):
                np.testing.assert_allclose(a, b.numpy(), atol=2e-6, rtol=1e-5, err_msg=f"{name} {b.path}")
            for key, values in logs.items():
                np.testing.assert_allclose(values, history.history[key][-len(values) :], rtol=1e-4)
