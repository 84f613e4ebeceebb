"""What `ParameterServerStrategy.distribute` mixes into a model: Keras' `fit` reads batches, workers train on them.

The model on the chief is a plain Keras model with values of its own. When an epoch's first batch comes they are loaded
to the ps tasks; while the epoch runs, the truth is there; at its end it is fetched back, before validation and
callbacks see the model.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.ps import slots
from tfdist.ps.store import Store
from tfdist.ps.work import Work
from tfdist.trainers.arguments import arguments, refuse_jit
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.models import given, mix, other_strategy
from tfdist.trainers.ps_optimizer import PSOptimizer
from tfdist.trainers.swap import has, swap

CALL_SECONDS = 0.1  # a call of this length costs under 5 % in coordination
MOST_STEPS = 8  # of a call: more make its graph large and its first run slow
SHOWN_EVERY = 0.2  # seconds between two looks at the metrics for the progress bar


class PSTrainer:
    """Mixed into a `keras.Model`; `self` stays the user's Sequential, functional or subclassed model."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        refuse_jit(super().compile, args, kwargs, NO_XLA)
        super().compile(*args, **kwargs)
        adopt(self)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        call = arguments(super().fit, args, kwargs)
        adopt(self)
        if self.run_eagerly:
            raise ValueError(
                f"Model {self.name!r} was compiled with run_eagerly=True, but the steps run as graphs in worker "
                "processes. Leave it out, or debug in one process without the strategy."
            )
        session = self.__dict__["_tfdist"]
        try:
            return super().fit(**call)
        finally:
            session.end(self)

    def make_train_function(self, force: bool = False) -> Any:
        self.train_function = self.__dict__["_tfdist"].train_function(self)
        return self.train_function

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"train_on_batch() of {self.name!r} would train one batch at a time on one worker. Use fit() under a "
            "parameter server, or a model that was not distributed."
        )

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        session = self.__dict__["_tfdist"]
        if session.training:
            logs = session.finish(self)
        return super()._get_metrics_result_or_logs(logs)


NO_XLA = (
    "the step of a worker holds operations of other tasks, which XLA cannot compile. Leave it out or pass "
    "jit_compile=False."
)


def distribute(model: Any, strategy: Any) -> Any:
    """See `ParameterServerStrategy.distribute`."""
    model = given(model, strategy)
    if has(model, PSTrainer) and model.__dict__["_tfdist"].strategy is strategy:
        return model
    if "_tfdist" in model.__dict__:
        raise other_strategy(model)
    mix(model, strategy, PSTrainer, Session(strategy, f"tfdist.model{next(strategy.models)}"), adopt, NO_XLA)
    return model


def adopt(model: Any) -> None:
    """Takes in what `compile` gave the model: its optimizer, no XLA."""
    if not getattr(model, "compiled", False):
        return
    if model.optimizer is not None:
        slots.check(model.optimizer)
        swap(model.optimizer, PSOptimizer)
    if model.jit_compile:
        model.jit_compile = False


class Session:
    """Training of one model: its store, the batches that are collected for the next call, what calls have returned."""

    def __init__(self, strategy: Any, name: str) -> None:
        self.strategy, self.name = strategy, name
        self.training = False  # whether the ps tasks hold newer values than the chief
        self.late: list[int] = []  # of each update: how many others came between its pull and its push
        self._calls = 0
        self._store: Store | None = None
        self._work: Work | None = None
        self._made_for: Any = None
        self._waiting: list[Any] = []
        self._steps = 1
        self._timed: list[tuple[float, int]] = []
        self._logs: Any = {}
        self._shown = 0.0

    def train_function(self, model: Any) -> Any:
        def train(iterator: Any) -> Any:
            for done in range(model.steps_per_execution):
                try:
                    batch = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if not done:
                        raise
                    break
                self.take(model, tf.nest.map_structure(_plain, batch))
            return self.logs(model)

        return train

    def take(self, model: Any, batch: Any) -> None:
        """Puts a batch into the next call; hands the call over when it is full."""
        if not self.training:
            self._begin(model)
        self._waiting.append(batch)
        if len(self._waiting) >= self._steps:
            self._send(model)

    def logs(self, model: Any) -> dict[str, Any]:
        """Metrics of what has been trained so far in this epoch, looked at now and then."""
        now = time.monotonic()
        if now - self._shown > SHOWN_EVERY:
            self._shown = now
            self._logs = {**self._logs, **model.get_metrics_result()}
        return self._logs

    def finish(self, model: Any) -> dict[str, Any]:
        """Waits for all updates; the model on the chief is up to date then. The epoch's logs."""
        if self._waiting:
            self._send(model)
        while found := self.strategy.chief.results(everything=True):
            self._learn(found)
        self._store.fetch()
        self.training = False
        return {**self._logs, **model.get_metrics_result()}

    def end(self, model: Any) -> None:
        """After `fit`, however it ended."""
        if self.training:
            self.strategy.chief.abandon()
            self._store.fetch()
            self.training = False
        self._waiting = []

    def _begin(self, model: Any) -> None:
        """The chief's values to the ps tasks; everything is made anew when the model was compiled or changed."""
        optimizer = model.optimizer
        variables = list(model.trainable_variables)
        if not optimizer.built:
            optimizer.build(variables)
        made_for = (id(optimizer), [id(v) for v in model.variables], id(model._compile_metrics))
        if made_for != self._made_for:
            metrics = metric_variables(model)
            kept = {id(v) for v in (*variables, *metrics)}
            others = [v for v in model.non_trainable_variables if id(v) not in kept]
            seeds = [v for v in others if keras.backend.standardize_dtype(v.dtype) == "uint32"]
            statistics = [v for v in others if v not in seeds]
            name = f"{self.name}.{self._calls}"
            self._store = Store(self.strategy.chief.ps_devices, optimizer, variables, statistics, name)
            self._work = Work(model, self._store, metrics, seeds, name)
            self._made_for, self._steps, self._timed = made_for, 1, []
        self._store.load()
        self._logs, self._shown = {}, time.monotonic()
        self.training = True

    def _send(self, model: Any) -> None:
        chief = self.strategy.chief
        while chief.full():
            self._learn(chief.results())
        function, tensors = self._work.call(self._waiting)
        rate = model.optimizer.learning_rate
        rate = np.float32(0.0 if callable(rate) else float(rate))
        began = time.monotonic()
        chief.schedule(function, (np.int64(self._calls), rate, *tensors))
        if self._steps == 1 and len(self._timed) < 3:
            # Too short a call is mostly coordination: time the first few, the very first of which sets things up.
            self._learn(chief.results(everything=True))
            self._timed.append((time.monotonic() - began, 1))
            if len(self._timed) == 3:
                step = min(seconds for seconds, _ in self._timed)
                self._steps = max(1, min(MOST_STEPS, round(CALL_SECONDS / step)))
        self._calls += 1
        self._waiting = []

    def _learn(self, results: list[Any]) -> None:
        for result in results:
            for variable, before, after in self._work.metrics_of(result["metrics"]):
                variable.assign(variable + (after - before) if variable.aggregation == "sum" else after)
            self.late += [int(n) for n in result["late"] if n >= 0]
            own = {k: v for k, v in result["logs"].items() if not isinstance(v, dict)}
            self._logs = {**own, **self._logs} if not self._logs else {**self._logs, **own}


def _plain(value: Any) -> Any:
    """A part of a batch; Keras wraps a missing one."""
    return None if isinstance(value, tf.experimental.Optional) else value
