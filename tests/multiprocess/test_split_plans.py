"""A model over several devices: branches side by side, plans as values, memory, and what computing again gives."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, make_devices, pair, refused

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers


def inception():
    first = keras.Input((8, 8, 3))
    stem = L.Conv2D(6, 3, padding="same", activation="relu", name="stem")(first)
    a = L.Conv2D(4, 1, activation="relu", name="a1")(stem)
    a = L.Conv2D(4, 3, padding="same", name="a2")(a)
    b = L.AveragePooling2D(3, 1, "same", name="b1")(stem)
    b = L.Conv2D(4, 1, activation="relu", name="b2")(b)
    both = L.Concatenate(name="both")([a, b])
    out = L.Dense(3, name="out")(L.GlobalAveragePooling2D(name="pool")(both))
    x = split_models.random.normal(size=(40, 8, 8, 3)).astype("float32")
    return keras.Model(first, out), x, split_models.classes(), split_models.SPARSE(from_logits=True)


def heads():
    first = keras.Input((12,))
    trunk = L.Dense(12, "relu", name="trunk")(first)
    one = L.Dense(1, name="one")(L.Dense(8, "relu", name="towards_one")(trunk))
    two = L.Dense(3, name="two")(L.Dense(8, "relu", name="towards_two")(trunk))
    model = keras.Model(first, {"one": one, "two": two})
    y = {"one": split_models.rows(1), "two": split_models.classes()}
    return model, split_models.rows(), y, {"one": "mse", "two": split_models.SPARSE(from_logits=True)}


def resnet():
    """M5: skips inside a stage, over one cut and over two (the long one)."""
    first = keras.Input((6, 6, 3))
    x = start = L.Conv2D(4, 3, padding="same", activation="relu")(first)
    for _ in range(4):
        y = L.Conv2D(4, 3, padding="same", activation="relu")(L.LayerNormalization()(x))
        y = L.Conv2D(4, 3, padding="same")(y)
        x = L.Activation("relu")(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D()(L.Add()([x, start]))
    images = split_models.random.normal(size=(40, 6, 6, 3)).astype("float32")
    return keras.Model(first, L.Dense(3)(x)), images, split_models.classes(), split_models.SPARSE(from_logits=True)


def trained(build, devices, **options):
    split, plain, x, y = pair(build, devices, microbatches=4, **options)
    logs = [m.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history for m in (split, plain)]
    assert_logs(*logs)
    assert_same(split, plain)
    return split, x, y


@CHECKS
def branches_train_on_devices_of_their_own(ring):
    for schedule in ("1f1b", "gpipe"):
        split, _, _ = trained(inception, CPUS[:2], balance={"b1": 1}, schedule=schedule)
        on = {layer.name: layer.variables[0].value.device[-1] for layer in split.layers if layer.variables}
        assert on == {"stem": "0", "a1": "0", "a2": "0", "b2": "1", "out": "1"}, on
        plan = split._tfdist.strategy.plan(split)
        assert sorted((s.device, s.operations) for s in plan.stages) == [  # Keras lists either branch first
            (0, ("a1", "a2")),
            (0, ("stem",)),
            (1, ("b1", "b2")),
            (1, ("both", "pool", "out")),
        ]


@CHECKS
def a_branch_comes_back_and_neither_waits_for_the_other(ring):
    """From the graph: no operation of one branch is before one of the other's in the same micro-batch."""
    split, x, y = trained(inception, CPUS[:2], balance={"b1": 1, "both": 0})
    assert sorted(s.device for s in split._tfdist.plan.stages) == [0, 0, 0, 1]
    specs = [tf.TensorSpec((20, *a.shape[1:]), a.dtype) for a in (x, y)]
    graph = tf.function(split.train_step).get_concrete_function(tuple(specs)).graph
    first = next(op for op in graph.get_operations() if "a2" in op.name and op.type == "Conv2D")
    other = next(op for op in graph.get_operations() if "b2" in op.name and op.type == "Conv2D")
    assert other not in ancestors(first)
    assert first not in ancestors(other)


@CHECKS
def heads_train_on_devices_of_their_own(ring):
    for schedule in ("1f1b", "gpipe"):
        split, x, _ = trained(heads, CPUS[:2], balance={"towards_two": 1}, schedule=schedule)
        assert split._tfdist.plan.stages[-1].operations == ()  # the loss, for which both wait
        assert split.predict(x, verbose=0)["two"].shape == (40, 3)


@CHECKS
def residual_networks_in_three_stages(ring):
    for schedule in ("1f1b", "gpipe"):
        split, _, _ = trained(resnet, CPUS[:3], schedule=schedule)
        assert len(split._tfdist.plan.stages) == 3


@CHECKS
def computing_again_gives_equal_gradients(ring):
    """M9; with dropout equal to keeping everything, the rest equal to plain Keras."""
    for build, schedule in (
        (split_models.regularized, "1f1b"),
        (split_models.masked, "gpipe"),
        (split_models.shared, "1f1b"),
        (inception, "gpipe"),
    ):
        trained(build, CPUS[:3], schedule=schedule, recompute=True)

    def dropped():
        parts = [part for _ in range(3) for part in (L.Dense(12, "relu"), L.Dropout(0.5), L.BatchNormalization())]
        model = keras.Sequential([keras.Input((12,)), *parts, L.Dense(3, "softmax")])
        return model, split_models.rows(), split_models.classes(), split_models.SPARSE()

    for schedule in ("1f1b", "gpipe"):
        results = []
        for recompute in (True, False):
            split, _, x, y = pair(dropped, CPUS[:3], microbatches=4, schedule=schedule, recompute=recompute)
            split.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
            results.append(split)
        assert_same(*results)


@CHECKS
def few_activations_are_kept(ring):
    """Peak memory of a step: computing again < 1f1b < gpipe, by what the schedules say to keep.

    Two stages, 8 micro-batches of 16 activations of 2 MB on each: at most 2 * 16, 3 * 16 (2 and 1 micro-batches) and
    16 * 16 of them are kept, 64, 96 and 512 MB.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process' memory can be set back on Linux only")
    peaks, before = {}, 0.0
    for name, options in {
        "again": {"schedule": "gpipe", "recompute": True},
        "1f1b": {"schedule": "1f1b"},
        "gpipe": {"schedule": "gpipe"},
    }.items():
        kept = [L.Activation("sigmoid") for _ in range(31)]
        model = keras.Sequential([keras.Input((16,)), L.Dense(1024), *kept, L.Dense(1)])
        strategy = tfdist.ModelParallelStrategy(CPUS[:2], balance=[16, 17], microbatches=8, **options)
        strategy.distribute(model).compile("sgd", "mse", jit_compile=False)
        x, y = np.ones((4096, 16), "f4"), np.ones((4096, 1), "f4")
        model.train_on_batch(x[:64], y[:64])  # weights and code are there
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = before or resident("VmRSS")  # one for all: memory that is freed stays with the process
        model.train_on_batch(x, y)
        peaks[name] = resident("VmHWM") - before
    # With gradients, copies and weights besides.
    assert peaks["gpipe"] > 0.75 * 512, peaks
    assert peaks["1f1b"] < 2 * 96, peaks
    assert peaks["again"] < 2 * 64, peaks


@CHECKS
def weight_gradients_come_after_those_of_activations(ring):
    """On the second stage of one micro-batch: all products for weights wait for both products that lead below."""
    split, _, x, y = pair(split_models.sequential, CPUS[:2], balance=[3, 2], microbatches=1)
    specs = [tf.TensorSpec((20, *a.shape[1:]), a.dtype) for a in (x, y)]
    split.fit(x, y, verbose=0)
    graph = tf.function(split.train_step).get_concrete_function(tuple(specs)).graph
    mine = [op for op in graph.get_operations() if op.type == "MatMul" and op.device.endswith("CPU:1")]
    weights = [op for op in mine if op.get_attr("transpose_a")]
    below = {op for op in mine if op.get_attr("transpose_b")}
    assert (len(weights), len(below)) == (2, 2)
    for op in weights:
        assert below <= ancestors(op), op.name


@CHECKS
def plans_are_values(ring):
    make = tfdist.ModelParallelStrategy
    model, *_ = split_models.shared()
    plan = make(CPUS[:2], balance="parameters").plan(model)
    names = [name for stage in plan.stages for name in stage.operations]
    assert any(name.endswith(" (2)") for name in names), names  # a layer that is called twice
    assert "stage 1 on device 1" in str(plan)
    path = ring.path / "plan.json"
    plan.save(path)
    assert tfdist.Plan.load(path) == plan
    refused(lambda: make(CPUS[:2], balance=plan).distribute(inception()[0]), "is for another model: it knows")
    split, _, _ = trained(inception, CPUS[:2], balance="parameters")
    own = split._tfdist.strategy.plan(split)
    again = inception()[0]
    assert make(CPUS[:2], balance=own).plan(again) == tfdist.Plan(again.name, own.stages)
    moved = {**own.mapping(), "b1": 1 - own.mapping()["b1"]}
    assert make(CPUS[:2], balance=moved).plan(again).mapping() == moved
    three = make(CPUS[:3], balance=[3, 3, 2]).plan(again)
    refused(lambda: make(CPUS[:2], balance=three), "a plan for 3 devices, and there are 2")


@CHECKS
def memory_decides(ring):
    """All weights are in the last layer but one; activations are in the first."""
    make = tfdist.ModelParallelStrategy
    wide = [L.Dense(512, name=f"wide{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((4,)), *wide, L.Dense(4096, name="heavy"), L.Dense(1, name="last")])
    by_time = make(CPUS[:2], balance=[3, 3]).plan(model)
    by_memory = make(CPUS[:2], balance="memory", batch_size=32).plan(model)
    assert by_memory.stages[0].operations == ("wide0", "wide1", "wide2", "wide3")
    assert by_time != by_memory
    tight = make(CPUS[:2], balance="parameters", memory=10e6)
    refused(lambda: tight.plan(model), "no cut into 2 stages keeps within 10,000,000 bytes")
    fits = make(CPUS[:2], balance="time", memory=60e6, batch_size=32).plan(model)
    assert "heavy" in fits.stages[1].operations


def ancestors(op):
    found, reached = set(), [op]
    while reached:
        now = reached.pop()
        for before in [t.op for t in now.inputs] + list(now.control_inputs):
            if before not in found:
                found.add(before)
                reached.append(before)
    return found


def resident(name):
    """MB of this process now ("VmRSS"), or at most ("VmHWM")."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))[1]) / 1024


test_split_plans = CHECKS.tests()
