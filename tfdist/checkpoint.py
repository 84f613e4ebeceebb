"""A checkpoint on disk from which a job that was killed or preempted goes on: at its epoch and step."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.cluster import JOB
from tfdist.comm import watch
from tfdist.trainers import handshake, keeping, stored, weights, whole_state
from tfdist.trainers.accord import LEAVE, SAVE, Accord
from tfdist.trainers.feeding import describe_input
from tfdist.trainers.logs import metric_variables
from tfdist.trainers.notice import Notice
from tfdist.trainers.places import place_after
from tfdist.trainers.ps_session import Session
from tfdist.trainers.split import Split
from tfdist.trainers.switchboard import Switchboard

SHARE = 0.05  # of the time, at most, that checkpoints take
LEFT = os.EX_TEMPFAIL  # 75, "try again later", the exit code of a job that is to be started again


class Checkpoint(keeping.Keeper):
    """Writes checkpoints while `fit` runs, and goes on from the last one in a run after it.

    ```python
    model.fit(x, y, epochs=10, callbacks=[tfdist.Checkpoint("/shared/job-17")])
    ```

    A checkpoint holds the weights with the optimizer (a plain Keras file), epoch and step, the metrics of the epoch so
    far, seeds and random states. It is written beside the last one and takes its place by one rename, so a kill at any
    moment leaves a whole one. A run that finds one loads it, goes on with its epoch, and passes over the batches that
    epoch has trained on already, on the same number of ranks or another. When `fit` is done the checkpoints are
    removed, as by `keras.callbacks.BackupAndRestore`.

    SIGTERM or SIGUSR1, at any process that runs `fit`, makes all of them write one checkpoint when the step is over and
    leave `fit` by `SystemExit` with code 75 (`os.EX_TEMPFAIL`): start the job again to go on. See docs/checkpoints.md.

    Args:
      directory: of this one `fit`, on a file system that outlives rank 0 or the chief, which writes.
      seconds: between two checkpoints; more where they would take more than 5 % of the time.

    Raises:
      ValueError: `seconds` is not positive; in `fit`: the model is not distributed, not built or has an optimizer that
        is not built, or what it trains on is not what the checkpoint was written in the middle of.
    """

    def __init__(self, directory: str | os.PathLike[str], seconds: float = 60.0) -> None:
        super().__init__()
        if not seconds > 0:
            raise ValueError(f"Checkpoint: seconds is {seconds!r}, expected a number above 0.")
        self.directory, self.seconds = Path(directory), seconds
        self._notice = Notice()
        self._board: Switchboard | None = None
        self._accord = Accord()
        self._found: stored.Progress | None = None
        self._first = 0
        self._seed: int | None = None
        self._trained: Any = None
        self._call: Any = None
        self._iterator: Any = None
        self._passing: keeping.Passing | None = None
        self._ahead = 0
        self._resumed = self._arrays = False
        self._kept: dict[str, np.ndarray] = {}
        self._random: dict[str, np.ndarray] = {}
        self._next, self._job = 0.0, ""

    # -- around fit ------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        _ring_of(model)  # which raises where the model was not distributed, so that `fit` has not called `open`

    def open(self, model: Any, call: dict[str, Any]) -> None:
        self._board, self._accord = _ring_of(model)
        self._trained = model
        self._call = call = dict(call)
        parts = (call["x"], call["y"], call["sample_weight"])
        self._arrays = private.is_arrays(*parts)
        self._data = describe_input(*parts)
        if self._arrays:
            self._data += f" in batches of {call['batch_size'] or 32}, shuffle={call['shuffle']}"
        self._found, self._resumed, self._job = None, False, ""
        if not self._writes:
            return
        check_directory(self.directory)
        if (last := stored.latest(self.directory)) is not None:
            self._found = stored.progress(last)
        if self._found is not None and self._found.job not in ("", os.environ.get(JOB)):
            self._found = None  # the end of another job's training
            self._remove()
        # The order of arrays comes from it; without one nobody could repeat it.
        known = private.global_seed()
        seed = self._found.seed if self._found is not None else known
        self._seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        if self._seed != known:
            tf.random.set_seed(self._seed)

    def progress(self) -> stored.Progress | None:
        return self._found

    def hear_progress(self, told: dict[str, Any] | None) -> None:
        self._found = None if told is None else stored.Progress(**told)

    def saw_data(self, epoch_iterator: Any) -> None:
        self._iterator = epoch_iterator

    def close(self) -> None:
        self._notice.forget()
        if self._passing is not None:
            self._passing.end()
        private.set_initial_epoch(self._trained, 0)  # which the next fit would take for its own
        self._trained = self._iterator = self._passing = self._call = None
        self._kept, self._random = {}, {}
        for which in (SAVE, LEAVE):
            self._accord.want(which, False)
        self._notice.repeat()

    @property
    def _writes(self) -> bool:
        return self._board is None or self._board.comm.rank == 0

    # -- while it runs ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        _check_built(self.model)
        for which in (SAVE, LEAVE):
            self._accord.drop(which)
        self._next = time.monotonic() + self.seconds
        self._first = self._call["initial_epoch"]
        if self._found is not None:
            self._go_on(self._found)
        self._notice.listen()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._resumed:
            self._resumed = False
            self._restore()
        self._random = stored.random_states()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._ahead:
            private.count_batches(self._iterator, self._ahead)
            self._ahead = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._passing is not None and self._passing.left:
            return
        self._ask()
        if not self.model.stop_training:  # then the epoch ends here
            self._act()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._passing is not None:
            self._passing.end()
        self._random = stored.random_states()
        self._ask()
        self._settle()
        self._act()

    def on_train_end(self, logs: Any = None) -> None:
        self._ask()
        self._settle()
        if self._accord.agreed(LEAVE):
            self._act()
        self._job = os.environ.get(JOB, "")
        if self._job:  # if a rank dies after this, the next round is not to train all again
            self.save()
        elif self._writes:
            self._remove()

    def _remove(self) -> None:
        for mine in stored.found(self.directory):
            shutil.rmtree(mine, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or the user keeps something else in it
            self.directory.rmdir()

    def save(self) -> None:
        """Writes a checkpoint now; of a ring's ranks all call it, at the same step.

        Nothing while batches are passed over: the last checkpoint is of a later step.
        """
        if self._passing is not None and self._passing.left:
            return
        began = time.monotonic()
        over = bool(self._job) or bool(self.model.stop_training) or (self._found is not None and self._found.done)
        done = over and not self.at.step
        at = stored.Progress(self.at.epoch, self.at.step, self._first, self._seed, done, self._data, self._job)
        with whole_state.as_one(self.model, self._board):
            if self._writes:
                self._last = stored.write(self.directory, at, self.model, self._state)
        ended = time.monotonic()
        self._next = ended + max(self.seconds, (ended - began) / SHARE)

    def _state(self) -> dict[str, np.ndarray]:
        metrics = metric_variables(self.model) if self.at.step else []
        return {
            **stored.named("seed", [v.numpy() for v in whole_state.seeds_of(self.model)]),
            **stored.named("metric", [v.numpy() for v in metrics]),
            **(self._random or stored.random_states()),
        }

    def leave(self) -> None:
        """As SIGTERM: a checkpoint when the step is over, and the end of all processes with exit code 75.

        For notices that come otherwise than by a signal: from any thread, or a handler of the program's own.
        """
        self._notice.tell()

    # -- wishes ----------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self._writes and time.monotonic() > self._next:
            self._accord.want(SAVE)
        if self._notice.told:
            self._accord.want(LEAVE)

    def _settle(self) -> None:
        with watch.waiting(f"the checkpoint of {self.model.name!r}"):
            self._accord.settle()

    def _act(self) -> None:
        leaves = self._accord.agreed(LEAVE)
        if not (leaves or self._accord.agreed(SAVE)):
            return
        self.save()
        for which in (SAVE, LEAVE):
            self._accord.drop(which)
        if not leaves:
            return
        why = self._notice.name if self._notice.told else "another rank was told to"
        self._notice.told = 0
        if self._board is not None:
            with watch.waiting(f"the last checkpoint of {self.model.name!r}"):
                self._board.comm.all_reduce(tf.constant(0), f"{self._board.key}/left")  # rank 0 has written it
        if self._writes:
            print(f"tfdist: leaving with exit code {LEFT} ({why}); {self._last} is where to go on", flush=True)
        raise SystemExit(LEFT)

    # -- going on --------------------------------------------------------------------------------------------

    def _go_on(self, at: stored.Progress) -> None:
        model, call = self.model, self._call
        if at.step and at.data != self._data:
            raise ValueError(
                f"The checkpoint in {self.directory} is from the middle of an epoch over {at.data}, but fit got "
                f"{self._data}. Call fit with the same, or remove the checkpoint to begin anew."
            )
        if at.step % model.steps_per_execution:
            raise ValueError(
                f"The checkpoint in {self.directory} is at step {at.step} of its epoch, which is no multiple of "
                f"steps_per_execution={model.steps_per_execution}. Compile with 1, or a divisor of it."
            )
        if self._writes:
            last = self.directory / at.name
            model.load_weights(last / stored.WEIGHTS)
            with np.load(last / stored.ARRAYS) as arrays:
                self._kept = dict(arrays)
            for variable, value in zip(
                whole_state.seeds_of(model), stored.values_of(self._kept, "seed"), strict=False
            ):
                variable.assign(value)
        whole_state.leave_to_root(model, self._board)
        self._first, self._resumed = at.first, True
        self.at.epoch, self.at.step = at.epoch, at.step
        private.set_initial_epoch(model, self.params["epochs"] if at.done else at.epoch)
        place = place_after(at.epoch - at.first, call["steps_per_epoch"], private.batches_in(self._iterator))
        if isinstance(call["x"], tf.data.Dataset):
            for _ in range(place.iterators):  # each draws a new order, where the data are shuffled
                iter(call["x"])
        self._ahead = place.batches
        if place.batches or at.step:
            self._passing = keeping.Passing(model, place.batches, at.step)
        if self._writes:
            print(
                f"tfdist: going on from {self.directory / at.name}: epoch {at.epoch + 1}, step {at.step}, "
                f"update {int(model.optimizer.iterations)}",
                flush=True,
            )

    def _restore(self) -> None:
        """When the epoch begins: what Keras has reset, and what others may have drawn from in the meantime."""
        if self._writes:
            stored.set_random_states(self._kept)
        if self._board is not None and self._board.comm.size > 1 and not self._arrays:
            handshake.share_python_random(self._board.comm)
        if self._found is None or not self._found.step:
            return
        kept = stored.values_of(self._kept, "metric")
        if not whole_state.set_metrics(self.model, self._board, kept) and self._writes:
            print("tfdist: the metrics are others than the checkpoint's; they count from here", flush=True)


def check_directory(directory: Path) -> None:
    """Makes it; ValueError where that fails, or nothing can be written there: not only when a checkpoint is due."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"Checkpoint: directory is {str(directory)!r}, where nothing can be written ({error.strerror or error}). "
            "Give one on a file system that outlives the job, which this user may write."
        ) from error


def _ring_of(model: Any) -> tuple[Switchboard | None, Accord]:
    state = model.__dict__.get("_tfdist")
    if isinstance(state, Switchboard):
        return state, state.accord
    if isinstance(state, (Session, Split)):
        return None, Accord()
    raise ValueError(
        "tfdist.Checkpoint is for models of one of tfdist's strategies: call `model = strategy.distribute(model)` "
        "before, or use keras.callbacks.BackupAndRestore."
    )


def _check_built(model: Any) -> None:
    """Raises where a checkpoint could not be loaded before the first step."""
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} has no weights when fit begins, so none could be loaded. Build it before: call it "
            "on a batch, or give it an Input."
        )
    for name, optimizer in weights.optimizers_of(model):
        if not optimizer.built:
            raise ValueError(
                f"Optimizer {name!r} of model {model.name!r} has no slots when fit begins, so none could be loaded. "
                "Build it before fit, on the variables that it trains: `optimizer.build(variables)`."
            )
