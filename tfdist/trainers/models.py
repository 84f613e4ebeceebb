"""What every strategy's `distribute` does with a model: checks it and changes its class."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import private
from tfdist.trainers.swap import has, swap


def check_backend() -> None:
    """Raises ValueError unless Keras computes with TensorFlow."""
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Keras runs on the {backend!r} backend, but tfdist trains on TensorFlow. Set KERAS_BACKEND=tensorflow "
            'before Keras is imported (or "backend" in ~/.keras/keras.json).'
        )


def given(model: Any, strategy: Any, mixin: type) -> keras.Model:
    """The model that was passed to `strategy.distribute`, or that the function passed there builds in the scope.

    It has `mixin` where the strategy has it already.

    Raises:
        ValueError: it is something else, such as a tf_keras model, or another strategy has it.
    """
    found = _model(model, strategy)
    state = found.__dict__.get("_tfdist")  # of an evaluator the strategy itself
    if state is not None and not (has(found, mixin) and getattr(state, "strategy", state) is strategy):
        raise ValueError(
            f"Model {found.name!r} was distributed by another strategy. Build it anew, or load it from a file, "
            "before this one."
        )
    return found


def _model(model: Any, strategy: Any) -> keras.Model:
    if isinstance(model, keras.Model):
        return model
    if any(c.__module__.split(".")[0] == "tf_keras" for c in type(model).__mro__):
        raise ValueError(
            f"distribute() received {type(model).__name__} of tf_keras (Keras 2). tfdist trains Keras 3 models: "
            "build it with `import keras`, and leave TF_USE_LEGACY_KERAS unset."
        )
    if callable(model) and not isinstance(model, type(keras)):
        with strategy.scope():
            built = model()
        if isinstance(built, keras.Model):
            return built
        raise ValueError(f"The function passed to distribute() returned {type(built).__name__}, not a keras.Model.")
    raise ValueError(
        f"distribute() received {type(model).__name__}; expected a keras.Model or a function that builds one."
    )


def mix(model: Any, strategy: Any, mixin: type, state: Any, adopt: Any, why_no_xla: str) -> None:
    """Makes `model` the strategy's: its class, what it remembers (`state`), and functions traced before forgotten.

    Raises:
        ValueError: the model was compiled with jit_compile=True.
    """
    compiled = getattr(model, "compiled", False)
    if compiled and model.jit_compile:
        if not private.auto_jit(model):  # so the user asked for it
            raise ValueError(f"Model {model.name!r} was compiled with jit_compile=True, but {why_no_xla}")
        model.jit_compile = False
    model.__dict__["_tfdist"] = state
    private.set_strategy(model, strategy)
    swap(model, mixin)
    if compiled:
        model.train_function = model.test_function = model.predict_function = None
        adopt(model)
