"""`strategy.distribute(model)`: what may be distributed, and the swap."""

from __future__ import annotations

import re
from typing import Any

import keras

from tfdist import private
from tfdist.trainers import weights
from tfdist.trainers.ring import NO_XLA, RingTrainer, adopt
from tfdist.trainers.swap import has, swap
from tfdist.trainers.switchboard import Switchboard, of

# The functions in which Keras calls a model's step.
KERAS_STEP = re.compile(r"\bmake_(train|test|predict)_function\b")


def check_backend() -> None:
    """Raises ValueError unless Keras computes with TensorFlow."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Keras runs on the {backend!r} backend, but tfdist trains on TensorFlow. Set KERAS_BACKEND=tensorflow "
            'before Keras is imported (or "backend" in ~/.keras/keras.json).'
        )


def distribute(model: Any, strategy: Any) -> Any:
    """See `RingAllReduceStrategy.distribute`."""
    if not isinstance(model, keras.Model):
        if any(c.__module__.split(".")[0] == "tf_keras" for c in type(model).__mro__):
            raise ValueError(
                f"distribute() received {type(model).__name__} of tf_keras (Keras 2). tfdist trains Keras 3 models: "
                "build it with `import keras`, and leave TF_USE_LEGACY_KERAS unset."
            )
        if callable(model) and not isinstance(model, type(keras)):
            with strategy.scope():
                built = model()
            if isinstance(built, keras.Model):
                return distribute(built, strategy)
            raise ValueError(f"The function passed to distribute() returned {type(built).__name__}, not a keras.Model.")
        raise ValueError(
            f"distribute() received {type(model).__name__}; expected a keras.Model or a function that builds one."
        )
    if has(model, RingTrainer):
        if of(model).strategy is not strategy:
            raise ValueError(
                f"Model {model.name!r} was distributed by another strategy. Build it anew, or load it from a file, "
                "before this one."
            )
        return model
    compiled = getattr(model, "compiled", False)
    if compiled and model.jit_compile:
        if not private.auto_jit(model):  # so the user asked for it
            raise ValueError(f"Model {model.name!r} was compiled with jit_compile=True, but {NO_XLA}")
        model.jit_compile = False
    model.__dict__["_tfdist"] = Switchboard(model, strategy, f"model{next(strategy.extended.models)}")
    private.set_strategy(model, strategy)
    swap(model, RingTrainer)
    if compiled:
        # Functions traced before know nothing of the ring.
        model.train_function = model.test_function = model.predict_function = None
        adopt(model)
    return model


def key_of(model: Any) -> str:
    """By which all ranks order their distributed models."""
    return of(model).key


def align_once(model: Any) -> None:
    """Gives every rank rank 0's weights, unless that was done before or the model has none yet."""
    weights.synchronize_once(model, of(model))


def refuse_undistributed(fn: Any) -> None:
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
            f"Model {model.name!r} runs under RingAllReduceStrategy but was not distributed, so its gradients and "
            "results would be one rank's. Add before compile(): `model = strategy.distribute(model)`."
        )
