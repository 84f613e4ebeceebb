"""`RingAllReduceStrategy.distribute(model)`, and what runs beside a distributed model."""

from __future__ import annotations

import re
from typing import Any

import keras

from tfdist.trainers import weights
from tfdist.trainers.models import given, mix
from tfdist.trainers.ring import NO_XLA, RingTrainer, adopt
from tfdist.trainers.swap import has
from tfdist.trainers.switchboard import Switchboard, of

# The functions in which Keras calls a model's step.
KERAS_STEP = re.compile(r"\bmake_(train|test|predict)_function\b")


def distribute(model: Any, strategy: Any) -> Any:
    """See `RingAllReduceStrategy.distribute`."""
    model = given(model, strategy, RingTrainer)
    if has(model, RingTrainer):
        return model
    board = Switchboard(model, strategy, f"model{next(strategy.extended.models)}")
    mix(model, strategy, RingTrainer, board, adopt, NO_XLA)
    return model


def key_of(model: Any) -> str:
    """By which all ranks order their distributed models."""
    return of(model).key


def align_once(model: Any) -> None:
    """Gives every rank rank 0's weights, unless that was done before or the model has none yet."""
    weights.synchronize_once(model, of(model))


def refuse_undistributed(fn: Any, strategy: str) -> None:
    """Raises where Keras runs a step of a model that was compiled under the strategy but never distributed."""
    layers = [fn]  # Keras' step, inside its conversion of optional inputs and, with XLA, a tf.function
    while inner := getattr(layers[-1], "__wrapped__", getattr(layers[-1], "python_function", None)):
        layers.append(inner)
    model = None
    for layer in layers:
        model = model or getattr(layer, "__self__", None)
        if KERAS_STEP.search(getattr(layer, "__qualname__", "")):
            cells = [c.cell_contents for c in (getattr(layer, "__closure__", None) or ())]
            model = model or next((c for c in cells if isinstance(c, keras.Model)), None)
    if isinstance(model, keras.Model) and not has(model, RingTrainer):
        raise ValueError(
            f"Model {model.name!r} runs under {strategy} but was not distributed, so its gradients and "
            "results would be one rank's. Add before compile(): `model = strategy.distribute(model)`."
        )
