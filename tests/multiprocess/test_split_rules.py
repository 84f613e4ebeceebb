"""A model over several devices: what is where, in which order, and what is refused."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, make_devices, pair, refused
from tfdist.planner.layout import chain
from tfdist.planner.schedule import order_of

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)


@CHECKS
def losses_that_micro_batches_cannot_add_up_are_refused(ring):
    def both():
        words = keras.Input((5,), dtype="int32")
        a = keras.layers.Embedding(11, 8, mask_zero=True)(words)
        out = keras.layers.Dense(3)(keras.layers.Dense(8, activity_regularizer="l2")(a))
        x = np.random.default_rng(1).integers(1, 11, (40, 5)).astype("int32")
        return keras.Model(words, out), x, split_models.classes(5), split_models.SPARSE(from_logits=True)

    split, _, x, y = pair(both, CPUS[:2], microbatches=2)
    refused(lambda: split.fit(x, y, verbose=0), "schedule='gpipe'")
    split, plain, x, y = pair(both, CPUS[:2], microbatches=2, schedule="gpipe")
    assert_logs(*(m.fit(x, y, shuffle=False, verbose=0).history for m in (split, plain)))
    assert_same(split, plain)


@CHECKS
def forward_backward_weights_and_slots_are_on_the_stages_device(ring):
    """M1: from the traced graph."""
    split, _, x, y = pair(split_models.sequential, CPUS[:2], balance=[3, 2], microbatches=2)
    split.fit(x, y, batch_size=20, verbose=0)
    for layer, cpu in zip(split.layers, [0, 0, 0, 1, 1], strict=True):
        for variable in layer.variables:
            assert variable.value.device.endswith(f"CPU:{cpu}"), (variable.path, variable.value.device)
    for variable in split.trainable_variables:
        slots = [v for v in split.optimizer.variables if variable.path.replace("/", "_") in v.path]
        assert [s.value.device for s in slots] == [variable.value.device] * 2, variable.path
    specs = [tf.TensorSpec((20, *a.shape[1:]), a.dtype) for a in (x, y)]
    graph = tf.function(split.train_step).get_concrete_function(tuple(specs)).graph
    found = collections.Counter((op.type, op.device[-1:]) for op in graph.get_operations())
    # Each micro-batch: a product forward for each layer, two backward, but for the input's gradient.
    assert found["MatMul", "0"] == 2 * (3 + 2 * 3 - 1), found
    assert found["MatMul", "1"] == 2 * (2 + 2 * 2), found
    assert (found["TanhGrad", "0"], found["TanhGrad", "1"]) == (2 * 3, 2 * 1), found


@CHECKS
def steps_happen_in_the_order_of_the_schedule(ring):
    """Each stage does one thing at a time, and 1f1b keeps few micro-batches alive."""
    seen = []

    class Watched(keras.layers.Layer):
        def call(self, x):
            stage = int(self.name[-1])

            @tf.custom_gradient
            def note(value):
                def back(gradient):
                    return tf.py_function(lambda g: (seen.append((stage, True)), g)[1], [gradient], gradient.dtype)

                return tf.py_function(lambda v: (seen.append((stage, False)), v)[1], [value], value.dtype), back

            return tf.ensure_shape(note(x), x.shape)

    for schedule in ("1f1b", "gpipe"):
        parts = []
        for stage in range(3):
            parts += [keras.layers.Dense(4), Watched(name=f"watched{stage}")]
        model = keras.Sequential([keras.Input((4,)), *parts])
        strategy = tfdist.ModelParallelStrategy(CPUS[:3], balance=[2, 2, 2], microbatches=6, schedule=schedule)
        strategy.distribute(model).compile("sgd", "mse", jit_compile=False)
        seen.clear()
        model.fit(np.ones((12, 4), "f4"), np.ones((12, 4), "f4"), batch_size=12, verbose=0)
        for stage, steps in enumerate(order_of(schedule, chain(3), 6)):
            assert [b for s, b in seen if s == stage] == [step.backward for step in steps], (schedule, stage, seen)


@CHECKS
def what_would_train_wrongly_is_refused(ring):
    layers = keras.layers
    split, _, x, y = pair(split_models.sequential, CPUS[:2], microbatches=2)
    split.compile("sgd", keras.losses.SparseCategoricalCrossentropy(reduction=None))
    refused(lambda: split.fit(x, y, verbose=0), "Give it a reduction")
    split.pop()
    refused(lambda: split.compile("sgd", "mse"), "got or lost layers")
    strange = keras.Sequential([keras.Input((12,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3)])
    tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2).distribute(strange).compile("sgd", split_models.SPARSE(True))
    refused(lambda: strange.fit(x, y, verbose=0), "not among its non-trainable ones")


@CHECKS
def a_number_of_devices_takes_what_is_there(ring):
    assert [d[-5:] for d in tfdist.ModelParallelStrategy(3).devices] == ["CPU:0", "CPU:1", "CPU:2"]
    assert [d[-5:] for d in tfdist.ModelParallelStrategy().devices] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@CHECKS
def a_mapping_puts_layers_where_it_says(ring):
    split, plain, x, y = pair(
        split_models.sequential, CPUS[:3], balance={"hidden1": "CPU:2", "hidden3": "CPU:1"}, microbatches=2
    )
    names = {layer.name: layer.kernel.value.device[-1] for layer in split.layers}
    assert [*names.values()] == ["0", "2", "2", "1", "1"], names
    assert_logs(*(m.fit(x, y, shuffle=False, verbose=0).history for m in (split, plain)))


@CHECKS
def the_cut_goes_by_measured_time(ring):
    """One layer takes nearly all of the time; measuring leaves the model as it was."""
    layers = keras.layers
    for light in (0, 3):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                *[layers.Dense(4, name=f"light{i}") for i in range(light)],
                layers.Dense(4096, name="widens"),
                layers.Dense(4096, name="heavy"),
                layers.BatchNormalization(name="averages"),
                layers.Dropout(0.5),
                layers.Dense(4, name="last"),
            ]
        )
        before = model.get_weights()
        tfdist.ModelParallelStrategy(CPUS[:2]).distribute(model)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)
        assert model.get_layer("last").kernel.value.device.endswith("CPU:1")
        assert model.get_layer("widens").kernel.value.device.endswith("CPU:0")
        assert [d for d in ("averages", "heavy") if model.get_layer(d).variables[0].value.device.endswith("CPU:1")]


@CHECKS
def one_number_for_a_batch_is_told_of(ring):
    """Right under 1f1b for a mean over samples, which the loss does not say; wrong for others."""
    from keras import losses, ops

    def half(y, p):
        return ops.mean(ops.square(y - p)) / 2

    for loss, weighted, words in (
        (losses.Dice(), False, "is no mean over samples"),
        (losses.Tversky(), False, "is no mean over samples"),
        (half, False, "only if that number is a mean over samples"),
        (half, True, "is weighted by samples after it was averaged"),
    ):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4, "sigmoid")])
        tfdist.ModelParallelStrategy(CPUS[:2], balance=[1, 1], microbatches=2).distribute(model).compile("sgd", loss)
        x = np.random.default_rng(0).random((8, 4)).astype("f4")
        with pytest.warns(UserWarning, match=words):
            model.fit(x, x, sample_weight=np.ones(8) if weighted else None, verbose=0)


@CHECKS
def what_cannot_be_is_said(ring):
    """M3 and others."""
    make = tfdist.ModelParallelStrategy
    refused(lambda: make(["/CPU:0", "/GPU:7"]), "device '/GPU:7' is unknown, expected one of")
    refused(lambda: make(["/CPU:0", "/CPU:0"]), "at least two different devices")
    refused(lambda: make(5), "before TensorFlow computes anything")
    refused(lambda: make(1), "at least two different devices")
    refused(lambda: make(["/CPU:0"]), "at least two different devices")
    refused(lambda: make(CPUS, schedule="zb"), "expected one of: 1f1b, gpipe")
    refused(lambda: make(CPUS, microbatches=0), "microbatches is 0")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
    refused(lambda: make(CPUS).distribute(model), "2 operations cannot be cut into 4 stages")
    for bad in ("luck", None, 5, [1, 2, 3], ["a", "b"], {}):
        refused(lambda bad=bad: make(CPUS[:2], balance=bad), "balance is ")
    refused(lambda: make(CPUS[:2], balance={"x": "CPU:3"}), "device 'CPU:3' is unknown")
    for bad in (2, -1, True, None, 1.5, []):
        refused(lambda bad=bad: make(CPUS[:2], balance={"x": bad}), "expected a number from 0 to 1")
    refused(lambda: make(CPUS[:2], balance={model.layers[1]: 1}), "expected names of layers")
    assert make(CPUS[:2], balance={"x": np.int64(1)}).wishes.balance == {"x": 1}
    refused(lambda: make(CPUS, microbatches=9, batch_size=8), "microbatches is 9 for batch_size=8")
    assert make(CPUS, batch_size=8).microbatches == 8
    refused(lambda: make(CPUS[:2], balance=[1, 1], memory=1e9), "yours is chosen. Leave memory out")
    kept = keras.layers.LSTM(4, stateful=True, name="long")
    state = keras.Sequential([keras.Input((4, 2), 8), kept, keras.layers.Dense(1)])
    refused(lambda: make(CPUS[:2]).distribute(state), "long of model")
    refused(lambda: make(CPUS, recompute="yes"), "recompute is 'yes', expected True or False")
    refused(lambda: make(CPUS, memory=-1), "memory is -1, expected the bytes")
    refused(lambda: make(CPUS, batch_size=0), "batch_size is 0, expected a number of at least 1, or None")
    alone = {model.layers[0].name: "CPU:1"}
    refused(lambda: make(CPUS[:2], balance=alone).distribute(model), "puts all layers on")
    for bad in (2.0, "CPU:0,CPU:1", [0, 1], 0, -1, ["/CPU:0", 1]):
        refused(lambda bad=bad: make(bad), "devices is ")
    for bad in (True, 1.5, "many"):
        refused(lambda bad=bad: make(CPUS[:2], microbatches=bad), "microbatches is ")
    refused(lambda: make(CPUS[:2], balance=[1, 2]).distribute(model), "add up to the model's 2")
    refused(lambda: make(CPUS[:2], balance={"nobody": "CPU:1"}).distribute(model), "balance names nobody")

    class Own(keras.Model):
        def call(self, x):
            return x

    refused(lambda: make(CPUS[:2]).distribute(Own()), "with a call() of its own")
    refused(lambda: make(CPUS[:2]).distribute(keras.Sequential([keras.layers.Dense(3)])), "was not built")

    class Steps(keras.Sequential):
        def train_step(self, data):
            return {}

    steps = Steps([keras.Input((4,)), keras.layers.Dense(3)])
    refused(lambda: make(CPUS[:2]).distribute(steps), "train_step of its own")
    split = make(CPUS[:2]).distribute(model)
    refused(lambda: split.compile("sgd", "mse", jit_compile=True), "jit_compile=True) was passed")


test_split_rules = CHECKS.tests()
