"""Whether a custom train_step's loss is a mean over the batch, as the joined batch of the ranks needs it.

A train_step with a tensor loss of its own tells nobody how it divides. The weighted sum of the ranks' gradients is
the gradient of the joined batch only for a mean; for a sum it would silently be n times too small. So before the
first `fit` the step is run twice outside of training, on made-up rows and on twice as many of the same: the gradient
of a mean stays, the gradient of a sum doubles.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.comm.collective import Alone
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.step import Step, entered

ROWS = 4


def refuse_sum(model: keras.Model, step_function: Any, spec: Any, reduce_op: str) -> None:
    """Raises ValueError where the gradients of `step_function(batch)` double with the batch.

    Says nothing where that cannot be told: a step that does not run on made-up data, or gradients that are zero or
    that chance decides.

    Args:
        spec: of the batches, as `tf.data` describes them.
    """
    if reduce_op != "mean":
        return
    variables = [*model.variables, *metric_variables(model)]
    before = [v.numpy() for v in variables]
    try:
        once = _gradients(step_function, spec, 1)
        twice = _gradients(step_function, spec, 2)
    except Exception:  # the step itself will tell, in training
        return
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    if any(doubles(a, b) for a, b in zip(once, twice, strict=False)):
        raise ValueError(
            f"The train_step of {model.name!r} computes gradients of a sum over its batch: they double when the batch "
            "does. The ranks' shares would then add up to a fraction of what one process computes. Divide the loss "
            "by the batch size (tf.reduce_mean), use `self.compute_loss`, or ask for sums: "
            'RingAllReduceStrategy(reduce_op="sum").'
        )


def doubles(once: np.ndarray, twice: np.ndarray) -> bool:
    """Whether one gradient is, clearly, twice the other."""
    size = float(np.linalg.norm(twice))
    if not np.isfinite(size) or size < 1e-12 or once.shape != twice.shape:
        return False
    return float(np.linalg.norm(twice - 2 * once)) < 0.02 * size


def _gradients(step_function: Any, spec: Any, times: int) -> list[np.ndarray]:
    """The gradients that each `apply` gets in one step on `times` x ROWS rows, flattened."""
    rows = tf.constant(ROWS * times)
    step = Step(Alone(), "probe", "mean", rows, tf.constant(ROWS))
    step.probed = []
    with entered(step):
        step_function(tf.nest.map_structure(lambda s: _made_up(s, times), spec))
    return [np.concatenate([np.asarray(tf.convert_to_tensor(g)).ravel() for g in gs]) for gs in step.probed if gs]


def _made_up(spec: Any, times: int) -> Any:
    """Rows without a meaning, the same ones `times` times over: zeros, ones, or small fractions."""
    if not isinstance(spec, tf.TensorSpec):
        raise TypeError(f"no rows can be made up for {spec}")
    shape = [ROWS, *(3 if n is None else n for n in list(spec.shape)[1:])]
    if spec.dtype == tf.string:
        return tf.fill([ROWS * times, *shape[1:]], "")
    part = np.random.default_rng(0).uniform(0.1, 0.9, shape) if spec.dtype.is_floating else np.zeros(shape)
    return tf.constant(np.concatenate([part] * times), spec.dtype)
