"""Models of each kind, split on two ranks each: parity with one process, evaluate and predict."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.hybrid_parts import SGD, alike, same_everywhere
from tests.multiprocess.split_parts import make_devices

CHECKS = Checks(__name__, prepare=make_devices)


def parity(ring, build, schedule, **options):
    """Batches of 15 and a short one of 10: uneven shares and micro-batches."""
    # Keras' Adam takes the repeated rows of an Embedding's gradient one by one.
    rows = build in (split_models.attention, split_models.masked)
    options.update(optimizer=(lambda: SGD(0.3)) if rows else None, microbatches=3, schedule=schedule)
    split, plain, x, y = alike(ring, build, {"batch_size": 15, "epochs": 1}, **options)
    told = split.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(told, plain.evaluate(x, y, verbose=0), rtol=2e-4, atol=2e-5)
    for ours, theirs in zip(*(keras.tree.flatten(m.predict(x, verbose=0)) for m in (split, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    same_everywhere(ring, told)


def register(build, schedule):
    def check(ring):
        parity(ring, build, schedule)

    check.__name__ = f"{build.__name__}_{schedule}"
    CHECKS(check)


@CHECKS
def a_branch_on_a_device_of_its_own_and_activations_computed_again(ring):
    parity(ring, split_models.two_ends, "1f1b", balance={"early": 1}, recompute=True)


for model in split_models.ALL:
    register(model, "1f1b")
for model in (split_models.skip, split_models.two_ends, split_models.masked):
    register(model, "gpipe")

test_hybrid_models = CHECKS.tests()
