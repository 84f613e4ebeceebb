"""Scaling of the learning rate with the batch."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.trainers.optimizer import RingOptimizer
from tfdist.trainers.swap import has
from tfdist.trainers.switchboard import Switchboard


class LinearScaling(keras.callbacks.Callback):
    """Linear scaling of the learning rate with gradual warm-up (Goyal et al. 2017, arXiv 1706.02677).

    With k = global batch / base batch, the learning rate rises in a straight line from its own value at the first
    update to k times that after `warmup_epochs`, update by update, and stays there (other callbacks may change it
    after the warm-up). tfdist never changes a learning rate unless this callback is given.

    ```python
    model.fit(x, y, batch_size=64 * strategy.num_replicas_in_sync, callbacks=[tfdist.LinearScaling(base_batch=64)])
    ```

    It goes by `optimizer.iterations`, so a run that is resumed in the middle of the warm-up goes on there. With a
    `LearningRateSchedule` the schedule's value is multiplied, on a model that was distributed.

    Args:
        base_batch: samples per update for which the learning rate was tuned.
        warmup_epochs: length of the warm-up in epochs; 0 scales at once.
        global_batch: samples per update of this run; taken from `fit` where None.
        steps_per_epoch: updates per epoch; taken from `fit` where None.

    Raises:
        ValueError: values out of range, or something above that `fit` cannot tell.
    """

    def __init__(
        self,
        base_batch: int,
        warmup_epochs: float = 5,
        *,
        global_batch: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if base_batch < 1:
            raise ValueError(f"base_batch is {base_batch}; expected a number of samples, at least 1.")
        if warmup_epochs < 0:
            raise ValueError(f"warmup_epochs is {warmup_epochs}; expected 0 or more.")
        self.base_batch, self.warmup_epochs = base_batch, warmup_epochs
        self.global_batch, self.steps_per_epoch = global_batch, steps_per_epoch
        self._ramp: tuple[float, int] = (1.0, 0)
        self._base: float | None = None
        self._done = False
        self._fresh = True

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer = self._optimizer()
        if _is_schedule(optimizer):
            if not has(optimizer, RingOptimizer):
                raise ValueError(
                    "LinearScaling with a LearningRateSchedule needs a distributed model: call "
                    "`model = strategy.distribute(model)` before compile()."
                )
        elif self._base is None:
            # Here, before BackupAndRestore loads a learning rate from the middle of a warm-up.
            state = optimizer.__dict__.get("_tfdist", self)
            if getattr(state, "base_rate", None) is None:
                state.base_rate = float(optimizer.learning_rate)
            self._base = state.base_rate

    base_rate: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        batch = self.global_batch or _global_batch(self.model)
        if batch is None:
            raise ValueError("LinearScaling cannot tell the global batch of this input; pass global_batch=.")
        steps = self.steps_per_epoch or self.params.get("steps")
        if steps is None and self.warmup_epochs:
            raise ValueError("LinearScaling cannot tell the steps per epoch of this input; pass steps_per_epoch=.")
        self._ramp = (batch / self.base_batch, round(self.warmup_epochs * (steps or 0)))
        optimizer = self._optimizer()
        if _is_schedule(optimizer):
            optimizer.__dict__["_tfdist"].ramp = self._ramp
            self.model.make_train_function(force=True)
        self._done, self._fresh = _is_schedule(optimizer), True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._done:
            return
        optimizer = self._optimizer()
        update = int(optimizer.iterations)
        if self._fresh and update > self._ramp[1]:  # resumed after the warm-up: the rate is as it was left
            self._done = True
            return
        self._fresh = False
        optimizer.learning_rate = self._base * scaled(update, *self._ramp)
        self._done = update >= self._ramp[1]

    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)


def scaled(update: float, factor: float, warmup: int) -> float:
    """What the learning rate is multiplied by at an update: from 1 at update 0 to `factor` at `warmup`."""
    return factor if update >= warmup else 1 + (factor - 1) * update / warmup


def _is_schedule(optimizer: Any) -> bool:
    config = optimizer.get_config()["learning_rate"]
    return isinstance(config, dict)


def _global_batch(model: Any) -> int | None:
    board = model.__dict__.get("_tfdist")
    return board.batch() if isinstance(board, Switchboard) else None
