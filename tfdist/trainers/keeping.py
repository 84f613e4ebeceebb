"""What `fit` does for a callback that keeps checkpoints: before its pipelines are made, and when it is over."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.cluster import ROUND
from tfdist.comm import watch

PROGRESS = "_checkpoint"  # the fact by which rank 0 tells the others where its checkpoint is


class Counter(keras.callbacks.Callback):
    """Ahead of all others, which may save: how far training is, as whole epochs and batches of the next one."""

    epoch = step = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.step = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.step = epoch + 1, 0


class Keeper(keras.callbacks.Callback):
    """A callback that keeps checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.at = Counter()

    @abstractmethod
    def open(self, model: Any, call: dict[str, Any]) -> None:
        """Before `fit` makes its pipelines: finds what to go on from, on the process that writes."""

    @abstractmethod
    def progress(self) -> Any:
        """What was found, as a dataclass; None for nothing."""

    @abstractmethod
    def hear_progress(self, told: dict[str, Any] | None) -> None:
        """What the process that writes has found, on every rank."""

    @abstractmethod
    def saw_data(self, epoch_iterator: Any) -> None:
        """Keras' iterator, when it is made."""

    @abstractmethod
    def close(self) -> None:
        """After `fit`, however it ended."""


def keeper_of(callbacks: Any) -> Keeper | None:
    """The one among the callbacks of a `fit`, which may be what `fit` accepts.

    Raises:
      ValueError: there are two.
    """
    found = [c for c in _listed(callbacks) if isinstance(c, Keeper)]
    if len(found) > 1:
        raise ValueError(f"fit got {len(found)} tfdist.Checkpoint callbacks, expected one: it says where to go on.")
    return found[0] if found else None


def _listed(callbacks: Any) -> list[Any]:
    callbacks = getattr(callbacks, "callbacks", callbacks)
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


@contextmanager
def kept(model: Any, call: dict[str, Any]) -> Iterator[None]:
    """Surrounds a `fit` with these arguments, of which it changes the callbacks."""
    keeper = keeper_of(call["callbacks"])
    if keeper is None and ROUND in os.environ:
        raise ValueError(
            "fit got no tfdist.Checkpoint, and this job is elastic (tfdist run --min-np): when a rank ends all would "
            "begin again. Pass callbacks=[tfdist.Checkpoint(DIRECTORY)], a directory that all hosts share."
        )
    if keeper is None:
        yield
        return
    # Behind all others, so that a checkpoint has what they have changed.
    others = [keeper.at, *(c for c in _listed(call["callbacks"]) if c is not keeper and c is not keeper.at)]
    if isinstance(call["callbacks"], keras.callbacks.CallbackList):
        call["callbacks"].callbacks = [*others, keeper]
    else:
        call["callbacks"] = [*others, keeper]
    model.__dict__["_tfdist_keeper"] = keeper
    keeper.open(model, call)
    try:
        yield
    finally:
        del model.__dict__["_tfdist_keeper"]
        keeper.close()


def saw_data(model: Any, epoch_iterator: Any) -> None:
    """Tells the keeper of a running `fit`, if there is one."""
    keeper = model.__dict__.get("_tfdist_keeper")
    if keeper is not None and epoch_iterator is not None:
        keeper.saw_data(epoch_iterator)


def facts(model: Any) -> dict[str, Any]:
    """What ranks compare and tell each other before `fit`."""
    keeper = model.__dict__.get("_tfdist_keeper")
    at = keeper.progress() if keeper is not None else None
    told = None if at is None else dataclasses.asdict(at)
    return {"tfdist.Checkpoint among the callbacks": keeper is not None, PROGRESS: told}


def learn(model: Any, of_root: dict[str, Any]) -> None:
    """Takes in what rank 0 told."""
    keeper = model.__dict__.get("_tfdist_keeper")
    if keeper is not None:
        keeper.hear_progress(of_root[PROGRESS])


class Passing:
    """Stands in for a model's train function until the batches are passed over that were trained on before.

    Callbacks see these steps go by, with the metrics of the epoch so far.

    Args:
      ahead: batches to take before the first step, of epochs before.
      steps: batches of this epoch.
    """

    def __init__(self, model: Any, ahead: int, steps: int) -> None:
        self._model, self._ahead, self.left = model, ahead, steps
        self._function: Callable[[Any], Any] = model.train_function
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        with watch.busy("passing over batches that were trained on before"):
            for _ in range(self._ahead):
                next(iterator)
            self._ahead = 0
            if self.left:
                self._pass(iterator)
                return dict(self._model.get_metrics_result())
        self.end()
        return self._function(iterator)

    def _pass(self, iterator: Any) -> None:
        for done in range(self._model.steps_per_execution):
            try:
                next(iterator)
            except StopIteration:
                if not done:
                    raise
                break
        self.left = max(0, self.left - self._model.steps_per_execution)
        if not self.left:
            self.end()

    def end(self) -> None:
        """The train function is the model's own again."""
        if self._model.train_function is self:
            self._model.train_function = self._function
        self.left = 0
