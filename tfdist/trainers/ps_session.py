"""Training of one model on a parameter server: its store, the calls that are under way, what they have returned."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.ps.store import Store
from tfdist.ps.work import Work
from tfdist.trainers import ps_norms
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.ps_dealing import Dealer, dealer_of, plain
from tfdist.trainers.ps_embedding import tables_of

SHOWN_EVERY = 0.2  # seconds between two looks at the metrics for the progress bar


class Session:
    """Training of one model.

    Attributes:
      training: whether the ps tasks hold newer values than the chief.
      evaluating: within `evaluate`, perhaps of a callback in the middle of an epoch.
      dropped: gradients that came too late to count, in the latest `fit`.
    """

    def __init__(self, strategy: Any, name: str) -> None:
        self.strategy, self.name = strategy, name
        self.training = self.evaluating = False
        self.dropped = 0
        self._late: collections.Counter[int] = collections.Counter()  # see `report`
        self._marks: list[tuple[float, int, int]] = []  # (time, updates, samples) as calls end
        self._rows = 0
        self._calls = 0
        self._whole: set[int] = set()  # ids of embeddings that the model uses as a whole
        self._store: Store | None = None
        self._work: Work | None = None
        self._dealer: Dealer | None = None
        self._made_for: Any = None
        self._model: Any = None
        self._spec: Any = None
        self._returned: dict[str, Any] = {}  # by the step that ended last
        self._metrics: dict[str, Any] = {}
        self._heard = False  # whether a call of this epoch has ended; until then the last values are shown
        self._shown = 0.0

    @property
    def limit(self) -> int:
        """Calls that keep all workers busy."""
        return self.strategy.chief.limit

    def report(self) -> dict[str, Any]:
        """About the latest `fit`.

        - `workers`, `ps`: tasks; `steps_a_call`: batches that a worker gets at a time
        - `updates`: applied; `late`: how many of them had 0, 1, 2, ... other updates between their pull and their push
        - `dropped`: gradients that came too late to count
        - `updates_per_s`, `samples_per_s`: all workers together, without the first fifth, which sets things up
        """
        marks = self._marks[len(self._marks) // 5 :] or [(0.0, 0, 0)]
        seconds = max(marks[-1][0] - marks[0][0], 1e-9)
        return {
            "workers": self.strategy.chief.workers,
            "ps": len(self.strategy.chief.ps_devices),
            "steps_a_call": self._dealer.steps if self._dealer is not None else 1,
            "updates": sum(self._late.values()),
            "late": dict(self._late),
            "dropped": self.dropped,
            "updates_per_s": (marks[-1][1] - marks[0][1]) / seconds,
            "samples_per_s": (marks[-1][2] - marks[0][2]) / seconds,
        }

    def train_function(self, model: Any) -> Any:
        self._late.clear()
        self._marks.clear()
        self.dropped = 0

        def train(iterator: Any) -> Any:
            for done in range(model.steps_per_execution):
                try:
                    batch = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if not done:
                        raise
                    break
                self.take(model, tf.nest.map_structure(plain, batch), iterator.element_spec)
            return self.logs(model)

        return train

    def take(self, model: Any, batch: Any, spec: Any) -> None:
        """Trains on a batch, now or soon."""
        if not self.training:
            self._begin(model)
        self._spec = tf.nest.map_structure(_plain_spec, spec)
        rows = int(tf.nest.flatten(batch)[0].shape[0])
        self._rows += rows
        self._dealer.take(batch, rows)

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
        self._dealer.finish()
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
        if self._dealer is not None:
            self._dealer.forget()

    def forget(self) -> None:
        """After `compile`: what was traced is of another loss."""
        self._made_for, self._returned, self._metrics = None, {}, {}

    # -- for the dealer --------------------------------------------------------------------------------------

    def send(self, batches: list[Any], share: float = 1.0) -> int:
        """Hands batches to the next free worker; the number of the call."""
        function, tensors = self._traced(batches)
        args = (np.int64(self._calls), np.float32(self._rate()), np.float32(share), *tensors)
        self.strategy.chief.schedule(self._calls, function, args)
        self._calls += 1
        return self._calls - 1

    def results(self, everything: bool = False) -> list[tuple[int, Any]]:
        """(number, result) of calls that have ended since; waits for one, or for `everything`."""
        found = [(call, self._work.result(value)) for call, value in self.strategy.chief.results(everything)]
        for _, result in found:
            self._heard = True
            for variable, before, after in result["metrics"]:
                variable.assign(variable + (after - before) if variable.aggregation == "sum" else after)
            self._returned = {k: v for k, v in result["logs"].items() if not isinstance(v, dict)}
        return found

    def combine(self, calls: list[int], weights: list[float]) -> None:
        """Makes an update of what calls have left on the ps tasks."""
        self._store.combine(calls, weights, self._rate())

    def count(self, updates: int, late: int) -> None:
        """Notes updates, each with so many of others between its pull and its push."""
        self._late[late] += updates
        self._marks.append((time.monotonic(), sum(self._late.values()), self._rows))

    # -- setting up ------------------------------------------------------------------------------------------

    def _begin(self, model: Any) -> None:
        """The chief's values to the ps tasks; everything is made anew when the model was compiled or changed."""
        self._model = model
        variables = list(model.trainable_variables)
        if not variables:
            raise ValueError(f"Model {model.name!r} has no trainable variables, so there is nothing to train.")
        if not model.optimizer.built:
            model.optimizer.build(variables)
        # As in Keras, a layer that is frozen or thawed counts from the next compile().
        made_for = [id(model.optimizer), *(id(v) for v in (*model.variables, *metric_variables(model)))]
        if made_for != self._made_for:
            self._make(variables)
            self._made_for = made_for
        self._store.load()
        self.training, self._heard = True, False

    def _make(self, variables: list[Any]) -> None:
        model, strategy = self._model, self.strategy
        ps_norms.check(model, strategy.consistency, strategy.chief.workers)
        metrics = metric_variables(model)
        kept = {id(v) for v in (*variables, *metrics)}
        others = [v for v in model.non_trainable_variables if id(v) not in kept]
        seeds = [v for v in others if keras.backend.standardize_dtype(v.dtype) == "uint32"]
        statistics = [v for v in others if v not in seeds]
        name = f"{self.name}.{self._calls}"
        dealer = dealer_of(strategy.consistency)
        found = tables_of(model, variables) if dealer.by_rows else []
        tables = [i for i in found if id(variables[i]) not in self._whole]
        self._store = Store(
            strategy.chief.ps_devices, model.optimizer, variables, statistics, name, strategy.consistency, tables
        )
        self._work = dealer.work(model, self._store, metrics, seeds, name)
        self._dealer = dealer(self, strategy.consistency, strategy.chief.workers)

    def _traced(self, batches: list[Any]) -> tuple[Any, list[tf.Tensor]]:
        try:
            return self._work.call(batches, self._spec)
        except Exception:
            if not self._work.needed_whole or not self.strategy.chief.idle:
                raise
        # Some table is used otherwise than by looking up rows: from now on it is held as any other variable. This is
        # found out by the first call, so the ps tasks hold what was loaded.
        variables = self._store.variables
        self._whole |= {id(variables[i]) for i in self._work.needed_whole}
        dealer = self._dealer
        self._make(variables)
        self._dealer = dealer  # it is what called
        self._store.load()
        return self._traced(batches)

    def _rate(self) -> float:
        """The learning rate, where the optimizer follows no schedule, which the ps tasks follow themselves."""
        rate = private.rate_of(self._model.optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return 0.0
        return float(rate() if callable(rate) else rate)


def _plain_spec(spec: Any) -> Any:
    return None if isinstance(spec, tf.OptionalSpec) else spec
