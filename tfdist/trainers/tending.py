"""tfdist's own callback, last in the list of every `fit`: what must happen between Keras' steps."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.comm import watch
from tfdist.trainers import weights
from tfdist.trainers.switchboard import Switchboard


class Tending(keras.callbacks.Callback):
    """Agrees on the first epoch, on the weights before the first step, and on stopping after each epoch."""

    def __init__(self, model: Any, board: Switchboard) -> None:
        super().__init__()
        self._tended, self._board = model, board
        self._fresh = True

    def on_train_begin(self, logs: Any = None) -> None:
        with watch.waiting(f"the start of fit of {self._board.model_name!r}"):
            weights.resumed_epoch(self._tended, self._board)
            if self._tended.built:  # what BackupAndRestore loaded on rank 0, for the callbacks of the others
                weights.synchronize(self._tended, self._board)
            if not self._board.bucket_bytes:
                self._board.choose_buckets(self._tended.trainable_variables)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._board.training = True
        if not self._fresh:
            return
        # Once more, where nothing can come between: other callbacks may have loaded or built something.
        self._fresh = False
        weights.synchronize(self._tended, self._board)
        self._board.synchronized = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with watch.waiting(f"the end of epoch {epoch + 1} of {self._board.model_name!r}"):
            self._board.accord.settle()
            if weights.synchronize(self._tended, self._board):
                self._board.tell(
                    f"the ranks' weights or learning rates differed at the end of epoch {epoch + 1}; rank 0's were "
                    "taken. A callback that changes them by the logs of a batch does that: those are each rank's own"
                )
