"""A report of where the time of a `fit` goes: on the ranks of a ring, or on a parameter server."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.comm.clock import Timing, timing
from tfdist.trainers import tensorboard
from tfdist.trainers.ps_session import Session
from tfdist.trainers.switchboard import Switchboard


class RunReport(keras.callbacks.Callback):
    """Measures a `fit` and prints a line about it at its end, on rank 0 or the chief.

    After training, `result` holds, of a ring, the medians over all steps but the first two (which trace and warm up):

    - `steps`, `step_s` (seconds), `samples_per_s` (all ranks together; None where the batch is unknown)
    - `communicating`: share of the step during which a reduction of gradients was under way, waiting for slower
      ranks included; `hidden`: share of that time which the backward pass went on meanwhile
    - `buckets` and `bytes` a step, before compression

    The times are taken by four operations a bucket in the step's graph.

    Under `ParameterServerStrategy` it holds what `tfdist.trainers.ps_session.Session.report` says: updates, their
    speed, how late gradients were, how many were dropped, and what the tasks did.

    Args:
      log_dir: for TensorBoard, under a parameter server: at each epoch's end a histogram of how late the gradients
        were so far, their mean, and how many were dropped. None: no files.

    Raises:
      ValueError: the model was not distributed, or `log_dir` is given for a ring.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.result: dict[str, Any] = {}
        self.log_dir = log_dir
        self._of: _Ring | _Server | None = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        state = model.__dict__.get("_tfdist")
        if isinstance(state, Session):
            self._of = _Server(state, self.log_dir)
        elif isinstance(state, Switchboard):
            if self.log_dir is not None:
                raise ValueError("RunReport(log_dir=...) is for a parameter server: a ring's gradients are never late.")
            state.clock_steps(model)
            self._of = _Ring(model, state)
        else:
            raise ValueError("RunReport needs a distributed model: call `model = strategy.distribute(model)` before.")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._of.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._of.end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._of.epoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        result, line = self._of.result()
        self.result = result
        if line:
            print(f"tfdist: {line}", flush=True)


class _Ring:
    """The steps of one rank."""

    def __init__(self, model: Any, board: Switchboard) -> None:
        self._model, self._board = model, board
        self._seconds: list[float] = []
        self._timings: list[Timing] = []
        self._start = 0.0

    def begin(self) -> None:
        self._start = time.perf_counter()

    def end(self) -> None:
        self._seconds.append(time.perf_counter() - self._start)
        for reducer in self._board.reducers[:1]:
            stamps = reducer.clock.read() if reducer.clock is not None else None
            if stamps is not None:
                self._timings.append(timing(*stamps))

    def epoch(self, epoch: int) -> None:
        pass

    def result(self) -> tuple[dict[str, Any], str]:
        """Figures, and the line to print on this rank."""
        board = self._board
        steps = self._seconds[2:] or self._seconds
        if not steps:
            return {}, ""
        executed = self._model.steps_per_execution
        step = statistics.median(steps) / executed
        batch = board.batch()
        traffic = [t for r in board.reducers for t in r.traffic.values()]
        timings = self._timings[2:] or self._timings
        found = {
            "steps": len(self._seconds) * executed,
            "step_s": step,
            "samples_per_s": None if batch is None else batch / step,
            "communicating": statistics.median(t.busy_s for t in timings) / step if timings else 0.0,
            "hidden": statistics.median(t.hidden for t in timings) if timings else 0.0,
            "buckets": sum(len(t.buckets) for t in traffic),
            "bytes": sum(t.dense_bytes for t in traffic),
        }
        return found, describe(found, board.comm.size) if board.comm.rank == 0 else ""


class _Server:
    """The updates of all workers."""

    def __init__(self, session: Session, log_dir: str | os.PathLike[str] | None) -> None:
        self._session = session
        self._writer = None if log_dir is None else tf.summary.create_file_writer(os.fspath(log_dir))

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def epoch(self, epoch: int) -> None:
        if self._writer is None:
            return
        late, dropped = self._session.lateness()
        mean = sum(n * k for n, k in late.items()) / max(sum(late.values()), 1)
        with self._writer.as_default():
            tensorboard.histogram("staleness", late, epoch)
            tensorboard.scalar("staleness/mean", mean, epoch)
            tensorboard.scalar("staleness/dropped", dropped, epoch)
        self._writer.flush()

    def result(self) -> tuple[dict[str, Any], str]:
        found = self._session.report()
        return found, describe_updates(found) if found["updates"] else ""


def describe(result: dict[str, Any], ranks: int) -> str:
    """The report of a ring as a line."""
    speed = "" if result["samples_per_s"] is None else f"{result['samples_per_s']:,.0f} samples/s, "
    line = f"{ranks} rank{'s' if ranks > 1 else ''}: {speed}{result['step_s'] * 1e3:.1f} ms a step"
    if ranks == 1:
        return line
    return (
        f"{line}, {result['communicating']:.0%} of it communicating ({result['hidden']:.0%} of that hidden behind the "
        f"backward pass); {result['buckets']} bucket{'s' if result['buckets'] != 1 else ''}, "
        f"{result['bytes'] / 1e6:.3g} MB a step"
    )


def describe_updates(result: dict[str, Any]) -> str:
    """The report of a parameter server as a line."""
    late, updates = result["late"], max(result["updates"], 1)
    shares = ", ".join(f"{n}: {late[n] / updates:.0%}" for n in sorted(late)[:4])
    rest = sum(late[n] for n in sorted(late)[4:])
    more = f", more: {rest / updates:.0%}" if rest else ""
    dropped = f"; {result['dropped']} gradients dropped as late" if result["dropped"] else ""
    return (
        f"{result['workers']} worker{'s' if result['workers'] > 1 else ''}, {result['ps']} ps: "
        f"{result['samples_per_s']:,.0f} samples/s, {result['updates_per_s']:.1f} updates/s; "
        f"{result['updates']} updates, {result['steps_a_call']} a call; "
        f"other updates between pull and push: {shares}{more}{dropped}; "
        f"the ps hold {', '.join(f'{held / 1e6:.3g}' for held in result['bytes_held'])} MB"
    )
