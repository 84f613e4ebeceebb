"""What `ParameterServerStrategy.distribute` mixes into a model: Keras' `fit` reads batches, workers train on them.

The model on the chief is a plain Keras model with values of its own. When an epoch's first batch comes they are loaded
to the ps tasks; while the epoch runs, the truth is there; at its end it is fetched back, before validation and
callbacks see the model.
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.ps import slots
from tfdist.ps.store import Store
from tfdist.ps.work import MOST_STEPS, Work, stackable
from tfdist.trainers import feeding
from tfdist.trainers.arguments import arguments, refuse_jit
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.models import given, mix, other_strategy
from tfdist.trainers.ps_optimizer import PSOptimizer
from tfdist.trainers.swap import has, swap

CALL_SECONDS = 0.5  # of a call, at which handing it out costs little
SHOWN_EVERY = 0.2  # seconds between two looks at the metrics for the progress bar


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
        if self.run_eagerly:
            raise ValueError(
                f"Model {self.name!r} was compiled with run_eagerly=True, but the steps run as graphs in worker "
                "processes. Leave it out, or debug in one process without the strategy."
            )
        session = self.__dict__["_tfdist"]
        try:
            return super().fit(**call)
        except tf.errors.OpError as error:
            session.strategy.chief.explain(error)
            raise
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
        session = self.__dict__["_tfdist"]
        session.evaluating = True
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            session.evaluating = False

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds from the pipeline's type: a batch read for it would be lost to a generator."""
        if iterator is not None:
            data_batch = tf.nest.map_structure(feeding.symbol, private.element_spec(iterator))
        self._symbolic_build(data_batch=data_batch)

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
        self.evaluating = False  # within `evaluate`, perhaps of a callback in the middle of an epoch
        self.late: collections.Counter[int] = collections.Counter()  # see `report`
        self._marks: list[tuple[float, int, int]] = []  # (time, updates, samples) as calls end
        self._rows = 0
        self._calls = 0
        self._store: Store | None = None
        self._work: Work | None = None
        self._made_for: Any = None
        self._waiting: list[Any] = []
        self._spec: Any = None
        self._steps = 1
        self._timed: list[float] = []  # seconds of the first calls of one step
        self._returned: dict[str, Any] = {}  # by the step that ended last
        self._metrics: dict[str, Any] = {}
        self._heard = False  # whether a call of this epoch has ended; until then the last values are shown
        self._shown = 0.0

    def report(self) -> dict[str, Any]:
        """About the latest `fit`.

        - `workers`, `ps`: tasks; `steps_a_call`: batches that a worker gets at a time
        - `updates`: applied; `late`: how many of them had 0, 1, 2, ... other updates between their pull and their push
        - `updates_per_s`, `samples_per_s`: all workers together, without the first fifth, which sets things up
        """
        marks = self._marks[len(self._marks) // 5 :] or [(0.0, 0, 0)]
        seconds = max(marks[-1][0] - marks[0][0], 1e-9)
        return {
            "workers": self.strategy.chief.workers,
            "ps": len(self.strategy.chief.ps_devices),
            "steps_a_call": self._steps,
            "updates": sum(self.late.values()),
            "late": dict(self.late),
            "updates_per_s": (marks[-1][1] - marks[0][1]) / seconds,
            "samples_per_s": (marks[-1][2] - marks[0][2]) / seconds,
        }

    def train_function(self, model: Any) -> Any:
        self.late.clear()
        self._marks.clear()

        def train(iterator: Any) -> Any:
            for done in range(model.steps_per_execution):
                try:
                    batch = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if not done:
                        raise
                    break
                self.take(model, tf.nest.map_structure(_plain, batch), iterator.element_spec)
            return self.logs(model)

        return train

    def take(self, model: Any, batch: Any, spec: Any) -> None:
        """Puts a batch into the next call; hands the call over when it is full."""
        if not self.training:
            self._begin(model)
        if self._waiting and not stackable(self._waiting[0], batch):
            self._send_waiting(model)
        self._spec = tf.nest.map_structure(_plain_spec, spec)
        self._waiting.append(batch)
        self._rows += int(tf.nest.flatten(batch)[0].shape[0])
        if len(self._waiting) >= self._steps:
            self._send_waiting(model)

    def logs(self, model: Any) -> dict[str, Any]:
        """What the step returns, with metrics of all that was trained so far in this epoch; looked at now and then."""
        now = time.monotonic()
        if not self._metrics or (self._heard and now - self._shown > SHOWN_EVERY):
            self._shown, self._metrics = now, dict(model.get_metrics_result())
        if not self._returned:  # no call has ended yet
            return self._metrics
        return {name: self._metrics.get(name, value) for name, value in self._returned.items()}

    def finish(self, model: Any) -> dict[str, Any]:
        """Waits for all updates; the model on the chief is up to date then. The epoch's logs."""
        if self._waiting:
            self._send_waiting(model)
        while found := self.strategy.chief.results(everything=True):
            self._learn(found)
        self._store.fetch()
        self.training, self._heard, self._shown = False, True, 0.0
        return self.logs(model)

    def end(self) -> None:
        """After `fit`, however it ended."""
        if self.training:
            self.training = False
            self.strategy.chief.abandon()
            with contextlib.suppress(tf.errors.OpError):  # a ps may be what is gone
                self._store.fetch()
        self._waiting = []

    def forget(self) -> None:
        """After `compile`: what was traced is of another loss."""
        self._made_for, self._returned, self._metrics = None, {}, {}

    def _begin(self, model: Any) -> None:
        """The chief's values to the ps tasks; everything is made anew when the model was compiled or changed."""
        optimizer = model.optimizer
        variables = list(model.trainable_variables)
        if not optimizer.built:
            optimizer.build(variables)
        metrics = metric_variables(model)
        # As in Keras, a layer that is frozen or thawed counts from the next compile().
        made_for = [id(optimizer), *(id(v) for v in (*model.variables, *metrics))]
        if made_for != self._made_for:
            kept = {id(v) for v in (*variables, *metrics)}
            others = [v for v in model.non_trainable_variables if id(v) not in kept]
            seeds = [v for v in others if keras.backend.standardize_dtype(v.dtype) == "uint32"]
            statistics = [v for v in others if v not in seeds]
            name = f"{self.name}.{self._calls}"
            self._store = Store(self.strategy.chief.ps_devices, optimizer, variables, statistics, name)
            self._work = Work(model, self._store, metrics, seeds, name)
            self._made_for, self._steps, self._timed = made_for, 1, []
        self._store.load()
        self.training, self._heard = True, False

    def _send_waiting(self, model: Any) -> None:
        batches, self._waiting = self._waiting, []
        chief = self.strategy.chief
        while chief.full():
            self._learn(chief.results())
        function, tensors = self._work.call(batches, self._spec)
        rate = model.optimizer.learning_rate
        rate = np.float32(0.0 if callable(rate) else float(rate))
        began = time.monotonic()
        chief.schedule(function, (np.int64(self._calls), rate, *tensors))
        if self._steps == 1 and len(self._timed) < 3:
            # Too short a call is mostly coordination: time the first few, the very first of which sets things up.
            self._learn(chief.results(everything=True))
            self._timed.append(time.monotonic() - began)
            if len(self._timed) == 3:
                self._steps = max(1, min(MOST_STEPS, round(CALL_SECONDS / min(self._timed))))
        self._calls += 1

    def _learn(self, results: list[Any]) -> None:
        for result in results:
            self._heard = True
            for variable, before, after in self._work.metrics_of(result["metrics"]):
                variable.assign(variable + (after - before) if variable.aggregation == "sum" else after)
            self.late.update(int(n) for n in result["late"] if n >= 0)
            self._marks.append((time.monotonic(), sum(self.late.values()), self._rows))
            self._returned = {k: v for k, v in result["logs"].items() if not isinstance(v, dict)}


def _plain(value: Any) -> Any:
    """A part of a batch; Keras wraps a missing one."""
    return None if isinstance(value, tf.experimental.Optional) else value


def _plain_spec(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec
