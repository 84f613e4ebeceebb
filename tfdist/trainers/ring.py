"""What `RingAllReduceStrategy.distribute` mixes into a model: shares in, one gradient out, global logs.

Keras' own `fit`, `evaluate` and `predict` stay the loops. The mixin hands them this rank's share of every
global batch, tells each step how much this rank counts, and makes what they report the same on every rank.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import watch
from tfdist.data.share import Share
from tfdist.trainers import feeding, files, gathering, keeping, losses, optimizer, probe, weights
from tfdist.trainers.accord import STOP
from tfdist.trainers.arguments import arguments, refuse_jit
from tfdist.trainers.logs import Globally, agree, metric_variables
from tfdist.trainers.step import Step, begin, entered
from tfdist.trainers.switchboard import DIFFERENT_BATCHES, Switchboard, of
from tfdist.trainers.tending import Tending


class RingTrainer:
    """Mixed into a `keras.Model`; `self` stays the user's Sequential, functional or subclassed model."""

    # -- compile -------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        refuse_jit(super().compile, args, kwargs, NO_XLA)
        super().compile(*args, **kwargs)
        adopt(self)

    # -- one step ------------------------------------------------------------------------------------------

    def train_step(self, data):
        board = of(self)
        if board.comm.size == 1:
            return super().train_step(data)
        logs, step = shared_step(self, board, "train", super().train_step, data)
        if self.trainable_variables and not step.applied:
            raise ValueError(
                f"The train_step of {self.name!r} applied no optimizer of the model, so its gradients would never be "
                "summed over the ranks. Use `self.optimizer.apply(gradients, variables)`, with an optimizer that is "
                "an attribute of the model when `compile` returns, or a custom loop with `strategy.run`."
            )
        return logs

    def test_step(self, data):
        board = of(self)
        if board.comm.size == 1:
            return super().test_step(data)
        logs, _ = shared_step(self, board, "test", super().test_step, data)
        return logs

    def predict_step(self, data):
        return super().predict_step(data.data if isinstance(data, Share) else data)

    def make_train_function(self, force=False):
        before = self.train_function
        super().make_train_function(force)
        if self.train_function is not before and of(self).comm.size > 1:
            self.train_function = watched(self.train_function, f"a training step of {self.name!r}")
        return self.train_function

    def make_test_function(self, force=False):
        before = self.test_function
        super().make_test_function(force)
        if self.test_function is not before and of(self).comm.size > 1:
            self.test_function = watched(self.test_function, f"an evaluation step of {self.name!r}")
        return self.test_function

    # -- the loops -----------------------------------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any):
        board = of(self)
        adopt(self)
        call = arguments(super().fit, args, kwargs)
        with keeping.kept(self, call):
            return self._tfdist_fit(super().fit, board, call)

    def _tfdist_fit(self, method, board, call):
        if board.comm.size == 1:
            board.global_batch, board.rows = feeding.batch_of(call), feeding.first_rows(call)
            return method(**call)
        board.told.clear()
        board.strategy.extended.dataset_batch = None
        board.unprobed = not board.probed
        with watch.waiting(f"fit of {self.name!r}"):
            call = feeding.fit_arguments(self, board, call)
        if board.comm.rank != 0:
            call["verbose"] = 0
        call["callbacks"] = tended(board, call["callbacks"], Tending(self, board))
        with board.strategy.extended.feeding("share", quiet=call["verbose"] == 0):
            return method(**call)

    def evaluate(self, *args: Any, **kwargs: Any):
        board = of(self)
        call = arguments(super().evaluate, args, kwargs)
        if board.comm.size == 1 or call.get("_use_cached_eval_dataset"):
            board.rows = feeding.first_rows(call)
            return super().evaluate(**call)
        adopt(self)
        with watch.waiting(f"evaluate of {self.name!r}"):
            call = feeding.evaluate_arguments(self, board, call)
        if board.comm.rank != 0:
            call["verbose"] = 0
        call["callbacks"] = files.keep_for(board.comm.rank, call["callbacks"])
        with board.strategy.extended.feeding("share", quiet=True):
            return super().evaluate(**call)

    def predict(self, *args: Any, gather: bool = True, **kwargs: Any):
        """Keras' `predict`; every rank computes a part and, unless `gather=False`, gets the whole in input order."""
        board = of(self)
        call = arguments(super().predict, args, kwargs)
        if board.comm.size == 1:
            return super().predict(**call)
        if board.comm.rank != 0:
            call["verbose"] = 0
        call["callbacks"] = files.keep_for(board.comm.rank, call["callbacks"])
        return gathering.predict(self, board, super().predict, call, gather)

    def train_on_batch(self, *args: Any, **kwargs: Any):
        return self._tfdist_on_batch(super().train_on_batch, args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any):
        return self._tfdist_on_batch(super().test_on_batch, args, kwargs)

    def predict_on_batch(self, x):
        board = of(self)
        if board.comm.size == 1:
            return super().predict_on_batch(x)
        return gathering.predict_on_batch(board, super().predict_on_batch, x)

    def _tfdist_on_batch(self, method, args, kwargs):
        board = of(self)
        call = arguments(method, args, kwargs)
        if board.comm.size == 1:
            return method(**call)
        adopt(self)
        wants_dict = call["return_dict"]
        call = feeding.batch_arguments(board, {**call, "return_dict": True})
        with board.strategy.extended.feeding("local", quiet=True):
            weights.synchronize_once(self, board)
            logs = method(**call)
        logs = {k: float(v) for k, v in self._get_metrics_result_or_logs(logs).items()}
        return logs if wants_dict else self._flatten_metrics_in_order(logs)

    # -- what the loops ask --------------------------------------------------------------------------------

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds from the pipeline's element spec: reading a batch for it would lose one of a generator."""
        keeping.saw_data(self, iterator)
        if iterator is not None:
            spec = private.element_spec(iterator)
            spec = spec.data if isinstance(spec, Share) else spec
            board = of(self)
            rows = board.rows or board.strategy.extended.dataset_batch
            data_batch = tf.nest.map_structure(lambda s: feeding.symbol(s, rows), spec)
        elif isinstance(data_batch, Share):
            data_batch = data_batch.data
        with of(self).strategy.scope():
            try:
                self._symbolic_build(data_batch=data_batch)
            except Exception:
                # A model that is only called by its own train_step (a GAN) builds there, as in plain Keras.
                if not own_step(self):
                    raise
        adopt(self)
        board = of(self)
        if board.unprobed and iterator is not None and board.comm.size > 1 and own_step(self):
            board.unprobed, board.probed = False, True
            probe.refuse_sum(self, super().train_step, spec, board.reduce_op)

    def _get_metrics_result_or_logs(self, logs):
        board = of(self)
        if board.comm.size == 1:
            return super()._get_metrics_result_or_logs(logs)
        if board.training:
            weights.average(board.comm, board.moving_statistics, f"{board.key}/moving")
            board.training = False
        with Globally(self, board):
            metrics = dict(self.get_metrics_result())
            own = super()._get_metrics_result_or_logs(logs)
        return own if own is not logs else agree(logs, metrics, board)

    @property
    def stop_training(self):
        return of(self).accord.agreed(STOP)

    @stop_training.setter
    def stop_training(self, value):
        accord = of(self).accord
        if value:
            accord.want(STOP)
        else:
            accord.drop(STOP)

    # -- files ---------------------------------------------------------------------------------------------

    def save(self, filepath, overwrite=True, **kwargs):
        self._tfdist_write("save", super().save, filepath, overwrite, kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        self._tfdist_write("save_weights", super().save_weights, filepath, overwrite, kwargs)

    def export(self, filepath, *args, **kwargs):
        board = of(self)
        if board.comm.rank != 0:
            return board.leave_to_root("export", filepath)
        with files.whole(filepath, "export") as path:
            return super().export(path, *args, **kwargs)

    def _tfdist_write(self, what, method, filepath, overwrite, kwargs):
        board = of(self)
        if board.comm.rank != 0:
            board.leave_to_root(what, filepath)
        elif files.must_ask(filepath, overwrite):
            method(filepath, overwrite=overwrite, **kwargs)
        else:
            with files.whole(filepath, what) as path:
                method(path, overwrite=True, **kwargs)


# ---------------------------------------------------------------------------------------------------------


def adopt(model: Any) -> None:
    """Takes in whatever `compile` (or the user, since) gave the model: optimizers, losses, no XLA."""
    board = of(model)
    for name, found in weights.optimizers_of(model):
        optimizer.adopt(found, board, name)
    losses.adopt(model)
    board.study(model)
    if getattr(model, "compiled", False) and model.jit_compile:
        model.jit_compile = False


def own_step(model: Any) -> bool:
    """Whether the user's class brings its own train_step or test_step."""
    cls = model.__class__  # without what was mixed in
    return cls.train_step is not keras.Model.train_step or cls.test_step is not keras.Model.test_step


NO_XLA = (
    "the ring's operations cannot be compiled by XLA. "
    'Leave it out (tfdist turns "auto" into False) or pass jit_compile=False.'
)


def watched(function: Any, what: str) -> Any:
    """A train or test function whose waiting on other ranks has a deadline, and whose own errors read well."""

    def run(iterator):
        with watch.waiting(what):
            try:
                return function(iterator)
            except tf.errors.InvalidArgumentError as error:
                text = str(error)
                if DIFFERENT_BATCHES in text:
                    raise ValueError(DIFFERENT_BATCHES_HELP) from error
                if "tfdist: " in text:
                    raise ValueError(told_by_graph(text)) from error
                raise

    return run


def told_by_graph(text: str) -> str:
    """tfdist's own message in the error of a failed assertion in a graph: `[b"tfdist: ..."]\\n\\t [[node]]`."""
    message = text[text.index("tfdist: ") + len("tfdist: ") :]
    message = re.split(r"[\"']?\]?\n\t \[\[|[\"']\]", message)[0]
    return message.replace("\\'", "'").replace('\\"', '"').strip()


DIFFERENT_BATCHES_HELP = (
    "The ranks' pipelines produce different global batches (their targets differ), so some samples would be used "
    "twice and others never. Every rank must build the same pipeline: seed its shuffle (`dataset.shuffle(n, seed=1)` "
    "or `keras.utils.set_random_seed(1)` before it is built), or, if each rank brings its own batches, set "
    "`options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF`."
)


def tended(board: Switchboard, callbacks: Any, tending: Tending) -> Any:
    """The callbacks of this rank, with tfdist's own as the last."""
    kept = files.keep_for(board.comm.rank, callbacks)
    if isinstance(kept, keras.callbacks.CallbackList):
        others = [c for c in kept.callbacks if not isinstance(c, Tending)]  # of a fit before
        kept.callbacks = [*others, tending]
        return kept
    return [*kept, tending]


def shared_step(model: Any, board: Switchboard, phase: str, method: Any, data: Any) -> tuple[Any, Step]:
    """Runs the model's own `method` on this rank's part of `data`; returns its logs and the step it was."""
    step, mine = begin(data, board.comm, f"{board.key}/{phase}", board.reduce_op)
    losses.adopt(model)
    with entered(step):
        kept = [] if step.ghost is None else ghosts_keep(model, board)
        logs = method(mine)
        restore(step, kept)
    return logs, step


def ghosts_keep(model: Any, board: Switchboard) -> list[tuple[Any, tf.Tensor]]:
    """(variable, value) of what a ghost's step must not change: metrics, and statistics of its own rank."""
    variables = metric_variables(model) + board.moving_statistics
    return [(v, tf.identity(v.value)) for v in variables]


def restore(step: Any, kept: list[tuple[Any, tf.Tensor]]) -> None:
    """Undoes a ghost's step for what `ghosts_keep` noted."""
    for variable, before in kept:
        variable.assign(tf.where(step.ghost, before, variable.value))
