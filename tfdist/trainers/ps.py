"""What `ParameterServerStrategy.distribute` mixes into a model: Keras' `fit` reads batches, workers train on them.

The model on the chief is a plain Keras model with values of its own. When an epoch's first batch comes they are loaded
to the ps tasks; while the epoch runs, the truth is there; at its end it is fetched back, before validation and
callbacks see the model.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import private
from tfdist.ps import slots
from tfdist.trainers import feeding, keeping, ps_embedding, ps_losses
from tfdist.trainers.arguments import arguments, refuse_jit
from tfdist.trainers.models import given, mix
from tfdist.trainers.ps_optimizer import PSOptimizer
from tfdist.trainers.ps_session import Session
from tfdist.trainers.swap import has, swap


class PSTrainer:
    """Mixed into a `keras.Model`; `self` stays the user's Sequential, functional or subclassed model."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        refuse_jit(super().compile, args, kwargs, NO_XLA)
        super().compile(*args, **kwargs)
        adopt(self)
        self.__dict__["_tfdist"].forget()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().fit, args, kwargs)
        adopt(self)
        if callable(call["x"]) and not isinstance(call["x"], tf.data.Dataset):
            call["x"] = self.__dict__["_tfdist"].strategy.distribute_datasets_from_function(call["x"])
        if self.run_eagerly:
            raise ValueError(
                f"Model {self.name!r} was compiled with run_eagerly=True, but the steps run as graphs in worker "
                "processes. Leave it out, or debug in one process without the strategy."
            )
        session = self.__dict__["_tfdist"]
        reading = session.strategy.reading(call.get("x"), call.get("validation_data"))
        with session.strategy.chief.one_fit(self.name), reading, keeping.kept(self, call):
            try:
                return super().fit(**call)
            finally:
                session.end()

    def make_train_function(self, force: bool = False) -> Any:
        self.train_function = self.__dict__["_tfdist"].train_function(self)
        return self.train_function

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"train_on_batch() of {self.name!r} would train one batch at a time on one worker. Use fit() under a "
            "parameter server, or a model that was not distributed."
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().evaluate, args, kwargs)
        session = self.__dict__["_tfdist"]
        session.snapshot()
        session.evaluating = True
        try:
            with session.strategy.reading(call.get("x")):
                return super().evaluate(**call)
        finally:
            session.evaluating = False

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().predict, args, kwargs)
        session = self.__dict__["_tfdist"]
        session.snapshot()
        with session.strategy.reading(call.get("x")):
            return super().predict(**call)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_tfdist"].snapshot()
        return super().save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_tfdist"].snapshot()
        return super().save_weights(*args, **kwargs)

    def get_weights(self) -> Any:
        self.__dict__["_tfdist"].snapshot()
        return super().get_weights()

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds from the pipeline's type: a batch read for it would be lost to a generator."""
        keeping.saw_data(self, iterator)
        if iterator is not None:
            data_batch = tf.nest.map_structure(feeding.symbol, private.element_spec(iterator))
        self._symbolic_build(data_batch=data_batch)
        ps_losses.adopt(self)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        session = self.__dict__["_tfdist"]
        if session.training and not session.evaluating:
            logs = session.finish(self)
        return super()._get_metrics_result_or_logs(logs)


NO_XLA = (
    "the step of a worker holds operations of other tasks, which XLA cannot compile. Leave it out or pass "
    "jit_compile=False."
)


def distribute(model: Any, strategy: Any) -> Any:
    """See `ParameterServerStrategy.distribute`."""
    model = given(model, strategy, PSTrainer)
    if has(model, PSTrainer):
        return model
    mix(model, strategy, PSTrainer, Session(strategy, f"tfdist.model{next(strategy.models)}"), adopt, NO_XLA)
    return model


def adopt(model: Any) -> None:
    """Takes in what `compile` gave the model: its optimizer, no XLA."""
    if not getattr(model, "compiled", False):
        return
    if model.optimizer is not None:
        slots.check(model.optimizer)
        swap(model.optimizer, PSOptimizer)
    ps_embedding.adopt(model)
    ps_losses.adopt(model)
    if model.jit_compile:
        model.jit_compile = False
