"""Two ranks with a split model each train as one process does on the joined batch."""

from __future__ import annotations

import keras
import numpy as np

from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.hybrid_parts import SGD, alike
from tests.multiprocess.split_parts import make_devices

CHECKS = Checks(__name__, prepare=make_devices)
SPARSE = split_models.SPARSE


@CHECKS
def batches_of_any_length_weights_and_optimizers(ring):
    """A rank without a sample, fewer samples than micro-batches, weights, clipping, accumulation, loss scales."""
    weights = np.random.default_rng(5).random(split_models.SAMPLES).astype("float32")
    rules = keras.optimizers
    cases = [
        ({"batch_size": 39, "sample_weight": weights}, {"metrics": ["accuracy"]}),  # ends with 1 sample: a ghost
        ({"batch_size": 19, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}, {}),  # 9 and 10; ends with 2 samples
        ({}, {"optimizer": lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.1)}),
        ({}, {"optimizer": lambda: SGD(0.1, clipnorm=0.05, use_ema=True, ema_overwrite_frequency=2)}),
        ({"batch_size": 10}, {"optimizer": lambda: rules.Adam(0.01, gradient_accumulation_steps=2)}),
        ({}, {"optimizer": lambda: rules.LossScaleOptimizer(rules.Adam(0.01))}),
        (
            {"batch_size": 10},
            {"optimizer": lambda: rules.LossScaleOptimizer(rules.Adam(0.01, gradient_accumulation_steps=2))},
        ),
    ]
    for number, (fit, options) in enumerate(cases):
        for schedule in ("1f1b", "gpipe")[: 2 if number < 2 else 1]:
            try:
                alike(ring, split_models.skip, {"epochs": 1, **fit}, microbatches=3, schedule=schedule, **options)
            except AssertionError as error:
                raise AssertionError(f"{fit}, {options}, {schedule}: {error}") from error


@CHECKS
def divisors_of_the_joined_batch(ring):
    """Losses divided by weights or valid positions, or by nothing: parts of one divisor."""
    weights = np.random.default_rng(5).random(split_models.SAMPLES).astype("float32")
    weights[:6] = 0.0  # all of rank 0's first share

    def dense(reduction):
        def build():
            model, x, y, _ = split_models.skip()
            return model, x, y, SPARSE(from_logits=True, reduction=reduction)

        return build

    sgd = {"optimizer": lambda: SGD(0.05)}
    for schedule in ("1f1b", "gpipe"):
        for build, fit in (
            (dense("mean_with_sample_weight"), {"sample_weight": weights}),
            (dense("sum"), {"sample_weight": weights}),
        ):
            # Ends with one sample: a rank without any.
            alike(ring, build, {"batch_size": 13, "epochs": 1, **fit}, microbatches=3, schedule=schedule, **sgd)


test_hybrid = CHECKS.tests()
