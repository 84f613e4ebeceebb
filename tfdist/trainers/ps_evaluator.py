"""What `distribute` mixes into a model in an evaluator task: `fit` evaluates the weights that the chief trains."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.ps import snapshots
from tfdist.ps.evaluator import Receiver
from tfdist.tasks.serving import leave
from tfdist.trainers import tensorboard
from tfdist.trainers.arguments import arguments
from tfdist.trainers.models import given
from tfdist.trainers.swap import has, swap


class PSEvaluator:
    """Mixed into a `keras.Model`; `self` stays the user's model, and all but `fit` is Keras' own."""

    def fit(self, *args: Any, **kwargs: Any) -> NoReturn:
        call = arguments(super().fit, args, kwargs)  # type: ignore[misc]
        receiver = self.__dict__["_tfdist"].receiver()
        try:
            _follow(self, receiver, call)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            atexit.register(leave, 1)
            raise
        atexit.register(leave, code)
        raise SystemExit(code)


def distribute(model: Any, strategy: Any) -> Any:
    """As `ParameterServerStrategy.distribute`, in an evaluator."""
    model = given(model, strategy, PSEvaluator)
    if not has(model, PSEvaluator):
        model.__dict__["_tfdist"] = strategy
        swap(model, PSEvaluator)
    return model


def _follow(model: Any, receiver: Receiver, call: Mapping[str, Any]) -> None:
    """Evaluates the chief's weights, again and again, until it is done."""
    name = receiver.task.name
    data = evaluation(call)
    if data is None:
        print(f"{name}: fit() was given no validation data, so there is nothing to evaluate", flush=True)
        receiver.decline()
        return
    if not model.built:
        model.evaluate(**{**data, "steps": 1})
    like = snapshots.values(model)
    writers = [tf.summary.create_file_writer(folder) for folder in log_folders(call["callbacks"])]
    while (snapshot := receiver.next(like)) is not None:
        if snapshot.arrays is not None:
            for variable, array in zip(model.weights, snapshot.arrays, strict=True):
                variable.assign(array)
            found = model.evaluate(**data, callbacks=[_Pulse(receiver)])
            print(line(name, snapshot.updates, found), flush=True)
            for writer in writers:
                _write(writer, snapshot.updates, found)
        if snapshot.last:
            receiver.evaluated()
            return


class _Pulse(keras.callbacks.Callback):
    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self._receiver = receiver

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._receiver.pulse()


def evaluation(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `evaluate` for the validation that a call of `fit` asks for; None where it asks for none."""
    data = call["validation_data"]
    if data is None and call["validation_split"]:
        _, data = private.validation_split((call["x"], call["y"], call["sample_weight"]), call["validation_split"])
    if data is None:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return {
        "x": x,
        "y": y,
        "sample_weight": sample_weight,
        "batch_size": call["validation_batch_size"] or call["batch_size"],
        "steps": call["validation_steps"],
        "verbose": 0,
        "return_dict": True,
    }


def line(name: str, updates: int, found: Mapping[str, Any]) -> str:
    """What is printed: `evaluator/0: after 1,240 updates: loss 0.1234, accuracy 0.9712`."""
    items = sorted(found.items(), key=lambda item: item[0] != "loss")  # Keras sorts by name
    values = (f"{k} {v:#.4g}" if np.ndim(v) == 0 else f"{k} {v}" for k, v in items)
    return f"{name}: after {updates:,} updates: {', '.join(values)}"


def log_folders(callbacks: Any) -> list[str]:
    """Where the evaluator's curves go: beside those of each TensorBoard callback."""
    callbacks = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
    return [os.path.join(c.log_dir, "evaluator") for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]


def _write(writer: Any, updates: int, found: Mapping[str, Any]) -> None:
    """Under the names that Keras' callback gives to validation, so that they share a chart."""
    with writer.as_default():
        for name, value in found.items():
            if np.ndim(value) == 0:
                tensorboard.scalar(f"evaluation_{name}_vs_iterations", value, updates)
    writer.flush()
