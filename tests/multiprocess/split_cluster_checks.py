"""A model over two tasks trains as the unsplit one does: `tfdist run --ps 0 --workers 2 <this> RESULTS FOLDER`."""

from __future__ import annotations

import collections
import json
import re
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess import split_models
from tests.multiprocess.split_parts import assert_logs, assert_same, pair, refused

results, folder = Path(sys.argv[1]), Path(sys.argv[2])
early = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
early_data = tf.data.Dataset.from_tensor_slices((np.ones((8, 12), "f4"), np.ones(8, "i4"))).batch(4)
HERE, THERE = tfdist.ModelParallelStrategy().devices  # the other task stays in here


def parity_of_every_model():
    for number, build in enumerate(split_models.ALL):
        schedule, devices = (("1f1b", [HERE, THERE]), ("gpipe", [THERE, HERE]))[number % 2]
        split, plain, x, y = pair(build, devices, microbatches=4, schedule=schedule)
        logs = [m.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history for m in (split, plain)]
        assert_logs(*logs)
        assert_same(split, plain)
        evaluated = [m.evaluate(x, y, verbose=0) for m in (split, plain)]
        np.testing.assert_allclose(*evaluated, rtol=2e-4, atol=2e-5)
        predicted = [keras.tree.flatten(m.predict(x, verbose=0)) for m in (split, plain)]
        for ours, theirs in zip(*predicted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def forward_backward_weights_and_slots_are_on_the_stages_task():
    """M1: from the traced graph."""
    split, _, x, y = pair(split_models.sequential, [HERE, THERE], balance=[3, 2], microbatches=2)
    split.fit(x, y, batch_size=20, verbose=0)
    for layer, device in zip(split.layers, [HERE] * 3 + [THERE] * 2, strict=True):
        assert {v.value.device for v in layer.variables} == {device}, layer.name
    for variable in split.trainable_variables:
        slots = [v for v in split.optimizer.variables if variable.path.replace("/", "_") in v.path]
        assert [s.value.device for s in slots] == [variable.value.device] * 2, variable.path
    specs = [tf.TensorSpec((20, *a.shape[1:]), a.dtype) for a in (x, y)]
    graph = tf.function(split.train_step).get_concrete_function(tuple(specs)).graph
    found = collections.Counter((op.type, op.device) for op in graph.get_operations())
    # Each micro-batch: a product forward for each layer, two backward, but for the input's gradient.
    assert found["MatMul", HERE] == 2 * (3 + 2 * 3 - 1), found
    assert found["MatMul", THERE] == 2 * (2 + 2 * 2), found
    assert (found["TanhGrad", HERE], found["TanhGrad", THERE]) == (2 * 3, 2 * 1), found


def saved_files_are_plain():
    split, plain, x, y = pair(split_models.skip, [HERE, THERE], microbatches=2, metrics=["accuracy"])
    for model in (split, plain):
        model.fit(x, y, validation_split=0.25, epochs=2, shuffle=False, verbose=0)
    split.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    assert type(loaded).__module__.startswith("keras.")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=2e-4, atol=2e-5)


def a_loaded_and_compiled_model_goes_on():
    again = keras.models.load_model(folder / "model.keras")
    split = keras.models.load_model(folder / "model.keras")
    tfdist.ModelParallelStrategy([THERE, HERE], microbatches=2).distribute(split)
    _, x, y, _ = split_models.skip()
    logs = [m.fit(x, y, shuffle=False, verbose=0).history for m in (split, again)]
    assert_logs(*logs)
    assert_same(split, again)


def names_of_devices():
    make = tfdist.ModelParallelStrategy
    assert make(["/job:worker/task:1", "/job:worker/task:0/CPU:0"]).devices == [THERE, HERE]
    assert make(2).devices == [HERE, THERE]
    assert make([HERE, THERE], balance={"x": "/job:worker/task:1/device:CPU:0"}).wishes.balance == {"x": 1}
    known = f"expected one of: {HERE}, {THERE}."
    refused(lambda: make([HERE, "/job:worker/task:2/CPU:0"]), f"'/job:worker/task:2/CPU:0' is unknown, {known}")
    refused(lambda: make([HERE, "/job:ps/task:0/CPU:0"]), f"device '/job:ps/task:0/CPU:0' is unknown, {known}")
    refused(lambda: make([HERE, "/CPU:0"]), f"device '/CPU:0' may be any of {HERE}, {THERE}")
    refused(lambda: make(3), "devices=3, but the cluster of TF_CONFIG, of 2 tasks, has 2")


def what_was_made_before_the_strategy_is_refused():
    refused(lambda: tfdist.ModelParallelStrategy().distribute(early), "Make the strategy first")
    split, *_ = pair(split_models.sequential, [HERE, THERE], microbatches=2)
    try:
        split.fit(early_data, verbose=0)
    except RuntimeError as error:
        assert re.match("fit met what was made before .* Make the strategy first", str(error)), error
    else:
        raise AssertionError("a dataset of a device that is no more")


told = {}
for check in (
    parity_of_every_model,
    forward_backward_weights_and_slots_are_on_the_stages_task,
    saved_files_are_plain,
    a_loaded_and_compiled_model_goes_on,
    names_of_devices,
    what_was_made_before_the_strategy_is_refused,
):
    keras.utils.set_random_seed(7)
    try:
        check()
        told[check.__name__] = ""
    except Exception:
        told[check.__name__] = traceback.format_exc()
results.write_text(json.dumps(told))
