"""`tfdist.Checkpoint` where a model is over several devices, against plain Keras that nobody interrupts."""

from __future__ import annotations

import keras
import numpy as np

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import checkpoint_cases as cases
from tests.multiprocess.split_parts import CPUS, make_devices

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers


def named():
    return keras.Sequential([keras.Input((6,)), L.Dense(8, "tanh", name="wide"), L.Dense(1, name="last")])


@CHECKS
def stages_and_layers_in_parts(ring):
    """Weights and slots of stages, of a layer in parts, and of a ring of split models."""
    parts = {"wide": ["CPU:0", "CPU:1"], "last": "CPU:1"}
    strategies = {
        "stages": tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2),
        "parts": tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2, balance=parts),
        "hybrid": tfdist.HybridStrategy(model_parallel={"devices": 2, "microbatches": 2}),
    }
    for name, strategy in strategies.items():
        optimizer = cases.accumulating if name == "stages" else cases.adam
        arguments = (named, optimizer, lambda: cases.arrays(epochs=4))
        plain = cases.straight(*arguments)
        ours = cases.interrupted(ring.path / name, strategy, *arguments, [(0, 5), (2, 1)])
        cases.assert_same(ours, plain, atol=1e-5)


@CHECKS
def another_order_in_each_epoch(ring):
    """Keras has begun the dataset once more there, to build the model; so it is compared with itself."""
    strategy = tfdist.ModelParallelStrategy(CPUS[:2], microbatches=2)
    whole = cases.compiled(named, cases.adam, strategy)
    history = whole.fit(cases.dataset(), epochs=3, verbose=0)
    fit = lambda: {"x": cases.dataset(), "epochs": 3}  # noqa: E731
    ours = cases.interrupted(ring.path / "kept", strategy, named, cases.adam, fit, [(1, 2)])
    for a, b in zip(ours[0].weights, whole.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    np.testing.assert_allclose(ours[1].history["loss"], history.history["loss"][1:], rtol=1e-5)


test_split = CHECKS.tests()
