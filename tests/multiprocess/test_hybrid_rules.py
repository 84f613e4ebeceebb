"""Split models on a ring: what is where, what waits for what, one plan for all ranks, and what is refused."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.hybrid_parts import hybrid, pair, same_everywhere
from tests.multiprocess.split_parts import CPUS, make_devices, refused
from tfdist.split import profile

CHECKS = Checks(__name__, prepare=make_devices)
L = keras.layers


def graph_of(strategy, model, x, y):
    """The graph of a step on ten samples a rank."""
    specs = [tf.TensorSpec((10, *a.shape[1:]), a.dtype) for a in (x, y)]
    step = tf.function(lambda *data: strategy.run(model.train_step, args=(data,)))
    return step.get_concrete_function(*specs).graph


def before(op):
    """All that an operation waits for."""
    found, todo = set(), [op]
    while todo:
        for earlier in (*(t.op for t in todo[-1].inputs), *todo.pop().control_inputs):
            if earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found


def buckets_of(operations):
    """(stage, operation) of the reductions of gradients, by where their result is taken apart."""
    reductions = [op for op in operations if op.type == "HorovodAllreduce" and ".bucket" in op.name]
    return [(int(op.outputs[0].consumers()[0].device[-1]), op) for op in reductions]


def counted(operations):
    return collections.Counter((op.type, op.device[-1:]) for op in operations)


@CHECKS
def forward_backward_weights_slots_and_updates_are_on_the_stages_device(ring):
    """M2: from the traced graph."""
    strategy = hybrid(balance=[3, 2], microbatches=2)
    adam = lambda: keras.optimizers.Adam(0.01, weight_decay=0.1)  # noqa: E731
    split, _, x, y = pair(split_models.sequential, strategy=strategy, optimizer=adam)
    split.fit(x, y, batch_size=20, verbose=0)
    for layer, cpu in zip(split.layers, [0, 0, 0, 1, 1], strict=True):
        for variable in layer.variables:
            assert variable.value.device.endswith(f"CPU:{cpu}"), (variable.path, variable.value.device)
    for variable in split.trainable_variables:
        slots = [v for v in split.optimizer.variables if variable.path.replace("/", "_") in v.path]
        assert [s.value.device for s in slots] == [variable.value.device] * 2, variable.path
    graph = graph_of(strategy, split, x, y)
    operations = graph.get_operations()
    found = counted(operations)
    # Each micro-batch: a product forward for each layer, two backward, but for the input's gradient.
    assert found["MatMul", "0"] == 2 * (3 + 2 * 3 - 1), found
    assert found["MatMul", "1"] == 2 * (2 + 2 * 2), found
    assert (found["TanhGrad", "0"], found["TanhGrad", "1"]) == (2 * 3, 2 * 1), found
    # Adam's two roots for each variable.
    assert (found["Sqrt", "0"], found["Sqrt", "1"]) == (2 * 6, 2 * 4), found
    # What is written to weights and slots was computed there: decay, two moments, update.
    handles = {id(v.value.handle): v for v in (*split.trainable_variables, *split.optimizer.variables) if len(v.shape)}
    written = {id(inner): handles[id(outer)] for outer, inner in graph.captures if id(outer) in handles}
    writes = [op for op in operations if op.type.startswith("Assign") and id(op.inputs[0]) in written]
    assert len(writes) == 4 * len(split.trainable_variables)
    for op in writes:
        assert op.inputs[1].op.device == written[id(op.inputs[0])].value.device, op
    # Buckets are packed and taken apart where their gradients are.
    (traffic,) = [t for r in split.__dict__["_tfdist"].reducers for t in r.traffic.values()]
    assert [b.stage for b in traffic.buckets] == [1, 0, 0, 0]  # of 1 kB; a layer has 624 bytes
    for bucket in traffic.buckets:
        assert {split.trainable_variables[r].value.device[-1] for r in bucket.rows} == {str(bucket.stage)}
    assert [s for s, _ in buckets_of(operations)] == [1, 0, 0, 0]
    for stage, reduction in buckets_of(operations):
        (packed,) = [t.op for t in reduction.inputs[0].op.inputs if t.dtype == tf.float32]
        assert packed.type in ("ConcatV2", "Reshape") and packed.device.endswith(f"CPU:{stage}"), packed
        assert all(op.device.endswith(f"CPU:{stage}") for op in reduction.outputs[0].consumers())
        assert reduction.device.endswith("CPU:0")  # Horovod's operation is the host's


@CHECKS
def the_last_stages_gradients_travel_while_the_first_stages_backward_goes_on(ring):
    """From the dependencies in the graph; a TanhGrad is a layer's backward of one micro-batch."""
    micros, layers = 4, 3
    for schedule, most in (("gpipe", 0), ("1f1b", (micros - 2) * layers)):
        strategy = hybrid(balance=[layers, 2], microbatches=micros, schedule=schedule)
        split, _, x, y = pair(split_models.sequential, strategy=strategy)
        split.fit(x, y, batch_size=20, verbose=0)
        operations = graph_of(strategy, split, x, y).get_operations()
        assert counted(operations)["TanhGrad", "0"] == micros * layers
        for stage, reduction in buckets_of(operations):
            waits = counted(before(reduction))
            if stage == 1:  # 1f1b goes on forwards only after it went back with those before
                assert waits["TanhGrad", "0"] <= most, (schedule, waits)
                assert waits["TanhGrad", "1"] >= micros - 1, (schedule, waits)
            else:
                assert waits["TanhGrad", "0"] >= micros * (layers - 1), (schedule, waits)
            assert not [op for op in before(reduction) if op.type == "HorovodAllreduce" and "bucket" in op.name]


@CHECKS
def rank_0_measures_and_cuts_for_all(ring):
    """M4's layers, whose measured times differ between ranks; rank 0's errors are everybody's."""
    measure, calls = profile.times, []

    def told(network, device, batch):
        assert ring.rank == 0, "measured on another rank"
        calls.append(network)
        if len(calls) > 1:
            raise ValueError("cannot be timed")
        assert batch == 5  # 20 samples for two ranks, in two micro-batches each
        return [(0.0, cost) for cost in (6.0, 5.0, 4.0, 3.0, 2.0, 1.0)]

    profile.times = told
    others = [keras.Sequential() for _ in range(ring.rank)]  # Keras' numbers of names differ from here on
    try:
        models = [keras.Sequential([keras.Input((4,)), *[L.Dense(4) for _ in range(6)]]) for _ in range(2)]
        strategy = tfdist.HybridStrategy(model_parallel={"devices": 2, "microbatches": 2, "batch_size": 20})
        plan = strategy.plan(models[0])
        assert [len(stage.operations) for stage in plan.stages] == [2, 4]
        calls.clear()
        assert strategy.plan(strategy.distribute(models[0])) == plan
        devices = [layer.kernel.value.device[-1] for layer in models[0].layers]
        assert same_everywhere(ring, "".join(devices)) == "001111"
        refused(lambda: strategy.distribute(models[1]), "cannot be timed")
    finally:
        profile.times = measure
    assert len(others) == ring.rank
    own = keras.Sequential([keras.Input((4,)), L.Dense(4), L.Dense(4), *[L.ReLU() for _ in range(ring.rank)]])
    refused(lambda: hybrid().distribute(own), "different operations on each rank: rank 0")


@CHECKS
def what_cannot_be_is_said(ring):
    make = tfdist.HybridStrategy
    for bad in (1, 0, True, None, 2.0, "2", ["/CPU:0", "/CPU:1"], {}, {"devices": ["/CPU:0", "/CPU:1"]}):
        refused(lambda bad=bad: make(model_parallel=bad), "expected their number for each rank, from 2 on")
    refused(
        lambda: make(model_parallel={"devices": 2, "micros": 3}),
        "model_parallel has 'micros'; known are 'devices', 'balance', 'microbatches', 'schedule'",
    )
    refused(lambda: make(model_parallel=2, ring={"bucket": 1}), "ring has 'bucket'; known are 'bucket_mb', ")
    refused(lambda: make(model_parallel=2, ring="fp16"), "expected a mapping of arguments of RingAllReduceStrategy")
    refused(lambda: make(model_parallel=2, ring={"reduce_op": "max"}), "reduce_op is 'max'; known are")
    refused(lambda: make(model_parallel={"devices": 2, "schedule": "zb"}), "expected one of: 1f1b, gpipe")
    refused(lambda: make(model_parallel=5), "before TensorFlow computes anything")
    two = [keras.Input((4,)), L.Dense(4), L.Dense(4)]
    strategy, model = hybrid(), keras.Sequential(two)
    refused(lambda: hybrid(3).distribute(model), "2 operations cannot be cut into 3 stages")
    refused(lambda: hybrid(balance={"nobody": "CPU:1"}).distribute(model), "balance names nobody")
    normed = keras.Sequential([*two, L.BatchNormalization(synchronized=True, name="normal")])
    refused(lambda: strategy.distribute(normed), "normal of model")

    class Own(keras.Model):
        def call(self, x):
            return x

    class Steps(keras.Sequential):
        def train_step(self, data):
            return {}

    refused(lambda: strategy.distribute(Own()), "with a call() of its own")
    refused(lambda: strategy.distribute(keras.Sequential([L.Dense(3)])), "was not built")
    refused(lambda: strategy.distribute(Steps([keras.Input((4,)), L.Dense(3)])), "train_step of its own")
    split = strategy.distribute(model)
    assert strategy.distribute(split) is split
    refused(lambda: split.compile("sgd", "mse", jit_compile=True), "jit_compile=True) was passed")
    refused(lambda: tfdist.ModelParallelStrategy(CPUS[:2]).distribute(split), "distributed by another strategy")
    refused(lambda: ring.strategy.distribute(split), "distributed by another strategy")
    with strategy.scope():
        plain = keras.Sequential(two)
        plain.compile("sgd", "mse")
        with pytest.raises(ValueError, match="runs under HybridStrategy but was not distributed"):
            plain.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)


@CHECKS
def a_report_and_a_linear_rate(ring):
    """The ring's callbacks."""
    split, _, x, y = pair(split_models.skip, microbatches=2)
    report = tfdist.RunReport()
    split.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[report, tfdist.LinearScaling(8, warmup_epochs=1)])
    assert report.result["steps"] == 6 and report.result["buckets"] > 2
    assert report.result["bytes"] == sum(4 * int(np.prod(v.shape)) for v in split.trainable_variables)
    np.testing.assert_allclose(split.optimizer.learning_rate.numpy(), 0.02)


test_hybrid_rules = CHECKS.tests()
