"""Training of one model on a parameter server: its store, the calls that are under way, what they have returned."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.ps.layout import bytes_by_task
from tfdist.ps.pieces import size_of
from tfdist.ps.store import Store
from tfdist.ps.work import Work, ordered
from tfdist.trainers import ps_norms
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.ps_dealing import Dealer, dealer_of, plain
from tfdist.trainers.ps_embedding import tables_of

HELD_LEAST = 1 << 16  # bytes of frozen values that workers keep; fewer are pulled, which spares a second trace
SNAPSHOT_SECONDS = 30.0  # between two snapshots at least
SNAPSHOT_SHARE = 0.04  # of the time, at most, that snapshots take
SHOWN_EVERY = 0.2  # seconds between two looks at the metrics for the progress bar


class Session:
    """Training of one model.

    Attributes:
      training: whether the ps tasks hold newer values than the chief.
      evaluating: within `evaluate`, perhaps of a callback in the middle of an epoch.
      dropped: gradients that came too late to count, in the latest `fit`.
      repeated: updates that a worker made and did not live to tell of, in the latest `fit`; they counted once.
    """

    def __init__(self, strategy: Any, name: str) -> None:
        self.strategy, self.name = strategy, name
        self.training = self.evaluating = False
        self.dropped = self.repeated = 0
        self._late: collections.Counter[int] = collections.Counter()  # see `report`
        self._marks: list[tuple[float, int, int]] = []  # (time, updates, samples) as calls end
        self._rows = 0
        self._calls = 0
        self._whole: set[int] = set()  # ids of embeddings that the model uses as a whole
        self._read_only: set[int] = set()  # ids of variables that steps do not write
        self._store: Store | None = None
        self._work: Work | None = None
        self._dealer: Dealer | None = None
        self._made_for: Any = None
        self._model: Any = None
        self._spec: Any = None
        self._returned: dict[str, Any] = {}  # by the step that ended last
        self._metrics: dict[str, Any] = {}
        self._made = 0
        self._next_snapshot = 0.0
        self._heard = False  # whether a call of this epoch has ended; until then the last values are shown
        self._shown = 0.0
        strategy.chief.tell_at_the_end(self)

    @property
    def limit(self) -> int:
        """Calls that keep all workers busy."""
        return self.strategy.chief.limit

    def report(self) -> dict[str, Any]:
        """About the latest `fit`.

        - `workers`, `ps`: tasks; `steps_a_call`: batches that a worker gets at a time
        - `updates`: applied; `late`: how many of them had 0, 1, 2, ... other updates between their pull and their push
        - `dropped`: gradients that came too late to count
        - `repeated`: updates that a worker made and did not live to tell of; another made them again, without effect
        - `bytes_held`: of parameters by each ps; `tasks`: see `ParameterServerStrategy.status`
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
            "repeated": self.repeated,
            "bytes_held": bytes_by_task(self._store.holdings, self._store.rows, len(self.strategy.chief.ps_devices))
            if self._store is not None
            else [],
            "tasks": self.strategy.status(),
            "updates_per_s": (marks[-1][1] - marks[0][1]) / seconds,
            "samples_per_s": (marks[-1][2] - marks[0][2]) / seconds,
        }

    def lateness(self) -> tuple[dict[int, int], int]:
        """Updates of the latest `fit` by how late they were, and gradients that were dropped."""
        return dict(self._late), self.dropped

    def train_function(self, model: Any) -> Any:
        self._late.clear()
        self._marks.clear()
        self.dropped = self.repeated = 0

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
        self._model = model
        self._spec = tf.nest.map_structure(_plain_spec, spec)
        rows = int(tf.nest.flatten(batch)[0].shape[0])
        self._rows += rows
        try:
            if not self.training:
                self._begin(model)
            self._dealer.take(batch, rows)
            if time.monotonic() > self._next_snapshot:
                self.snapshot()
        except tf.errors.OpError as error:
            self._recover(error)

    def snapshot(self) -> None:
        """In the middle of an epoch: waits for the updates under way; the model on the chief is up to date then.

        What it costs decides how soon the next one comes by itself.
        """
        if not self.training:
            return
        began = time.monotonic()
        self._catch_up()
        ended = time.monotonic()
        self._next_snapshot = ended + max(SNAPSHOT_SECONDS, (ended - began) / SNAPSHOT_SHARE)

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
        self._catch_up()
        self.training, self._heard, self._shown = False, True, 0.0
        return self.logs(model)

    def _catch_up(self) -> None:
        """Waits for all updates, brings the values to the chief, and offers them to an evaluator."""
        try:
            self._dealer.finish()
            self._store.fetch()
        except tf.errors.OpError as error:
            self._recover(error)
        self.strategy.chief.offers.offer(self._model)

    def end(self) -> None:
        """After `fit`, however it ended."""
        if self.training:
            self.training = False
            if not self.strategy.chief.abandon():
                self._made_for = None  # what is left of this fit must not reach the next one
            with contextlib.suppress(tf.errors.OpError):  # a ps may be what is gone
                self._store.fetch()
        if self._dealer is not None:
            self._dealer.forget()

    def forget(self) -> None:
        """After `compile`: what was traced is of another loss."""
        self._made_for, self._returned, self._metrics = None, {}, {}
        self._whole.clear()
        self._read_only.clear()

    def release(self) -> None:
        """At the end of the process: lets go of what is on the tasks."""
        self._store = self._work = self._dealer = None

    # -- for the dealer --------------------------------------------------------------------------------------

    def send(self, batches: list[Any], share: float = 1.0) -> int:
        """Hands batches to the next free worker; the number of the call."""
        function, tensors = self._traced(batches)
        order = ordered(self._calls, self._rate(), share, self._store.held.stamp)
        self.strategy.chief.schedule(self._calls, function, (order, *tensors))
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
        """Notes updates, each with so many of others between its pull and its push.

        -1: the update was made before, by a worker that died before it could tell.
        """
        self.repeated += updates if late < 0 else 0
        self._late[max(late, 0)] += updates
        self._marks.append((time.monotonic(), sum(self._late.values()), self._rows))

    # -- setting up ------------------------------------------------------------------------------------------

    def _begin(self, model: Any) -> None:
        """The chief's values to the ps tasks; everything is made anew when the model was compiled or changed."""
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
        self._next_snapshot = time.monotonic() + SNAPSHOT_SECONDS

    def _recover(self, error: tf.errors.OpError) -> None:
        """After a ps was started again: all ps tasks go back to the chief's last values, and training goes on.

        Raises:
          RuntimeError: it did not come back.
          error: nothing was lost on a ps.
        """
        lost = self._store.lost if self._store is not None else lambda device: False
        self.strategy.chief.recover(error, lost, self.strategy.recover_seconds)
        self._make(list(self._model.trainable_variables))
        self._store.load()
        self.training = True
        updates = int(self._model.optimizer.iterations)
        print(f"tfdist: all ps tasks are back at update {updates}, the last one the chief had; going on", flush=True)

    def _make(self, variables: list[Any]) -> None:
        model, strategy = self._model, self.strategy
        ps_norms.check(model, strategy.consistency, strategy.chief.workers)
        metrics = metric_variables(model)
        kept = {id(v) for v in (*variables, *metrics)}
        others = [v for v in model.non_trainable_variables if id(v) not in kept]
        seeds, statistics, held = [], [], []
        for variable in others:
            if keras.backend.standardize_dtype(variable.dtype) == "uint32":
                seeds.append(variable)
            else:
                (held if id(variable) in self._read_only else statistics).append(variable)
        name = f"{self.name}.{self._made}"
        self._made += 1
        dealer = dealer_of(strategy.consistency)
        found = tables_of(model, variables) if dealer.by_rows else []
        tables = [i for i in found if id(variables[i]) not in self._whole]
        self._store = Store(
            strategy.chief.ps_devices, model.optimizer, variables, statistics, name, strategy.consistency, tables, held
        )
        self._work = dealer.work(model, self._store, metrics, seeds, name)
        self._dealer = dealer(self, strategy.consistency, strategy.chief.workers)

    def _traced(self, batches: list[Any]) -> tuple[Any, list[tf.Tensor]]:
        """The function of a call, and its tensors. What the first trace teaches of the model may make all anew."""
        try:
            found = self._work.call(batches, self._spec)
        except Exception:
            # Was it a table that is used otherwise than by looking up rows? Then hold it as any other variable.
            if not self._work.needed_whole or not self.strategy.chief.idle:
                raise
            self._whole |= {id(self._store.variables[i]) for i in self._work.needed_whole}
            return self._traced_anew(batches)
        frozen = [self._store.statistics[i] for i in self._work.unwritten]
        if sum(size_of(v) for v in frozen) >= HELD_LEAST and self.strategy.chief.idle:
            self._read_only |= {id(v) for v in frozen}
            return self._traced_anew(batches)
        return found

    def _traced_anew(self, batches: list[Any]) -> tuple[Any, list[tf.Tensor]]:
        """Nothing was sent before, so the ps tasks hold what was loaded, and the dealer, which calls, stays."""
        dealer = self._dealer
        self._make(self._store.variables)
        self._dealer = dealer
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
