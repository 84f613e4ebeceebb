"""Checks of the model parallel strategy on four logical CPUs: `python split_checks.py RESULTS`, see test_split.py."""

from __future__ import annotations

import collections
import json
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess import split_models
from tfdist.planner.schedule import order_of

CHECKS = []
CPUS = [f"/CPU:{i}" for i in range(4)]


def check(function):
    CHECKS.append(function)
    return function


def pair(build, devices, optimizer=None, metrics=(), **options):
    """(split, plain) models that begin alike, and their data."""
    options.setdefault("balance", "parameters")  # the same cut each time
    models = []
    for split in (True, False):
        keras.utils.set_random_seed(3)
        split_models.random = np.random.default_rng(0)
        model, x, y, loss = build()
        if split:
            strategy = tfdist.ModelParallelStrategy(devices, **options)
            with strategy.scope():
                assert strategy.distribute(model) is model
        rule = optimizer() if optimizer else keras.optimizers.Adam(0.01)
        model.compile(rule, loss, metrics=list(metrics) or None, jit_compile=False)
        models.append(model)
    return *models, x, y


def assert_same(split, plain, rtol=2e-4, atol=2e-5):
    for ours, theirs in zip(split.variables, plain.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=rtol, atol=atol, err_msg=ours.path)
    for ours, theirs in zip(split.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=rtol, atol=atol, err_msg=ours.path)


def assert_logs(ours, theirs):
    assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


@check
def parity_of_every_model():
    """Batches of 16 and a short one of 8, two epochs; weights, slots, logs, evaluate and predict."""
    for build in split_models.ALL:
        for schedule in ("1f1b", "gpipe"):
            split, plain, x, y = pair(build, CPUS[:3], microbatches=4, schedule=schedule)
            logs = [m.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history for m in (split, plain)]
            try:
                assert_logs(*logs)
                assert_same(split, plain)
                np.testing.assert_allclose(
                    split.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=2e-4, atol=2e-5
                )
                for ours, theirs in zip(
                    *(keras.tree.flatten(m.predict(x, verbose=0)) for m in (split, plain)), strict=True
                ):
                    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
            except AssertionError as error:
                raise AssertionError(f"{build.__name__}, {schedule}: {error}") from error


@check
def batches_of_any_length_weights_and_optimizers():
    """M6: 10 samples in 4 micro-batches, fewer samples than micro-batches, weights of samples and classes."""
    weights = np.random.default_rng(5).random(split_models.SAMPLES).astype("float32")
    cases = [
        ({"batch_size": 10}, {}),
        ({"batch_size": 19}, {}),  # ends with 2 samples
        ({"batch_size": 16, "sample_weight": weights}, {}),
        ({"batch_size": 16, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, {}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.AdamW(0.01, use_ema=True)}),
        (
            {"batch_size": 16},
            {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)},
        ),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)}),
        ({"batch_size": 16}, {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))}),
    ]
    for schedule in ("1f1b", "gpipe"):
        for fit, options in cases:
            split, plain, x, y = pair(
                split_models.skip, CPUS[:2], microbatches=4, schedule=schedule, metrics=["accuracy"], **options
            )
            logs = [m.fit(x, y, epochs=2, shuffle=False, verbose=0, **fit).history for m in (split, plain)]
            assert_logs(*logs)
            assert_same(split, plain)


@check
def losses_that_micro_batches_cannot_add_up_are_refused():
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


@check
def forward_backward_weights_and_slots_are_on_the_stages_device():
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


@check
def steps_happen_in_the_order_of_the_schedule():
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
        for stage, steps in enumerate(order_of(schedule, 3, 6)):
            assert [b for s, b in seen if s == stage] == [step.backward for step in steps], (schedule, stage, seen)


@check
def normalization_goes_by_micro_batch_and_its_averages_move_once():
    """The oracle: numpy on the same micro-batches."""

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(6), layers.BatchNormalization(momentum=0.9), layers.Dense(3)]
        )
        return model, split_models.rows(6), split_models.classes(), split_models.SPARSE(from_logits=True)

    for schedule in ("1f1b", "gpipe"):
        split, _, x, y = pair(build, CPUS[:2], balance=[1, 2], microbatches=3, schedule=schedule)
        kernel, bias = split.layers[0].get_weights()
        split.fit(x, y, batch_size=40, shuffle=False, verbose=0)
        parts = np.split(x @ kernel + bias, [13, 26])  # 13, 13 and 14 samples
        mean, variance = (sum(len(p) * f(p, axis=0) for p in parts) / 40 for f in (np.mean, np.var))
        _, _, moving_mean, moving_variance = split.layers[1].get_weights()
        np.testing.assert_allclose(moving_mean, 0.1 * mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(moving_variance, 0.9 + 0.1 * variance, rtol=1e-4)


@check
def dropout_does_not_depend_on_the_cut():
    def build():
        layers = keras.layers
        dropped = [part for _ in range(3) for part in (layers.Dense(12, "relu"), layers.Dropout(0.5))]
        model = keras.Sequential([keras.Input((12,)), *dropped, layers.Dense(3, "softmax")])
        return model, split_models.rows(), split_models.classes(), split_models.SPARSE()

    results = []
    for devices in (2, 3, 4):
        for schedule in ("1f1b", "gpipe"):
            split, _, x, y = pair(build, CPUS[:devices], microbatches=4, schedule=schedule)
            split.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
            results.append(split)
    for other in results[1:]:
        assert_same(results[0], other)
    masks = [v for v in results[0].non_trainable_variables if "seed" in v.path]
    assert all(int(m.numpy()[1]) == 2 * 2 * 4 for m in masks), [m.numpy() for m in masks]


@check
def files_are_plain_and_callbacks_work():
    split, _, x, y = pair(split_models.skip, CPUS[:2], microbatches=2, metrics=["accuracy"])
    path = Path(sys.argv[1]).with_name("model.keras")
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)
    split.fit(x, y, validation_split=0.25, epochs=5, verbose=0, callbacks=[stop])
    assert stop.stopped_epoch == 1
    split.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded) is keras.Model or type(loaded).__module__.startswith("keras.")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), split.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert [layer.output.shape for layer in split.layers[1:]], "layers have one output each"


@check
def what_was_trained_before_goes_on():
    """A model that was compiled and fitted, its slots with it, and its loss scale."""
    for rule in (keras.optimizers.Adam, lambda r: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(r))):
        models = []
        for distributed in (True, False):
            keras.utils.set_random_seed(3)
            split_models.random = np.random.default_rng(0)
            model, x, y, loss = split_models.skip()
            model.compile(rule(0.01), loss, jit_compile=False)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            if distributed:
                tfdist.ModelParallelStrategy(CPUS[:3], balance="parameters", microbatches=4).distribute(model)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            models.append(model)
        assert_same(*models)


@check
def images_in_batches_smaller_than_the_micro_batches():
    """Kernels that take no empty batch; sizes known and unknown to the graph."""

    def build():
        layers = keras.layers
        first = keras.Input((6, 6, 2))
        a = layers.Conv2D(4, 3, activation="relu", padding="same")(first)
        b = layers.MaxPooling2D()(layers.SeparableConv2D(4, 3, padding="same", activation="relu")(a))
        out = layers.Dense(3)(layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(b)))
        x = np.random.default_rng(1).normal(size=(11, 6, 6, 2)).astype("float32")
        return keras.Model(first, out), x, split_models.classes()[:11], split_models.SPARSE(from_logits=True)

    for schedule in ("1f1b", "gpipe"):
        for size in (8, 2):  # 8 and 3 samples in 4 micro-batches, or 2 at a time
            split, plain, x, y = pair(build, CPUS[:2], microbatches=4, schedule=schedule, metrics=["accuracy"])
            pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=size == 2)
            logs = [m.fit(pipeline, epochs=2, verbose=0).history for m in (split, plain)]
            assert_logs(*logs)
            assert_same(split, plain)


@check
def what_would_train_wrongly_is_refused():
    layers = keras.layers
    split, _, x, y = pair(split_models.sequential, CPUS[:2], microbatches=2)
    split.compile("sgd", keras.losses.SparseCategoricalCrossentropy(reduction=None))
    refused(lambda: split.fit(x, y, verbose=0), "Give it a reduction")
    split.pop()
    refused(lambda: split.compile("sgd", "mse"), "got or lost layers")
    strange = keras.Sequential([keras.Input((12,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(3)])
    tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2).distribute(strange).compile("sgd", split_models.SPARSE(True))
    refused(lambda: strange.fit(x, y, verbose=0), "not among its non-trainable ones")


@check
def a_number_of_devices_takes_what_is_there():
    assert [d[-5:] for d in tfdist.ModelParallelStrategy(3).devices] == ["CPU:0", "CPU:1", "CPU:2"]
    assert [d[-5:] for d in tfdist.ModelParallelStrategy().devices] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]


@check
def a_mapping_puts_layers_where_it_says():
    split, plain, x, y = pair(
        split_models.sequential, CPUS[:3], balance={"hidden1": "CPU:2", "hidden3": "CPU:1"}, microbatches=2
    )
    names = {layer.name: layer.kernel.value.device[-1] for layer in split.layers}
    assert [*names.values()] == ["0", "2", "2", "1", "1"], names
    assert_logs(*(m.fit(x, y, shuffle=False, verbose=0).history for m in (split, plain)))


@check
def the_cut_goes_by_measured_time():
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


@check
def what_cannot_be_is_said():
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
    for bad in ("luck", None, 5, [1, 2, 3], ["a", "b"], {}, {"dense": 1}):
        refused(lambda bad=bad: make(CPUS[:2], balance=bad), "balance is ")
    refused(lambda: make(CPUS[:2], balance={"x": "CPU:3"}), "device 'CPU:3' is unknown")
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


def refused(call, words):
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"accepted; expected an error with {words!r}")


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(CPUS))
    found = {}
    for one in CHECKS:
        if len(sys.argv) > 2 and not any(word in one.__name__ for word in sys.argv[2:]):
            continue
        try:
            one()
            found[one.__name__] = ""
        except BaseException:
            found[one.__name__] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
