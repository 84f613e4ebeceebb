"""The state of training that is not the same on every rank, as one process would have it, and back.

| what | in a checkpoint | on going on |
|---|---|---|
| metrics of the epoch so far | the sum over ranks | rank 0 has it, the others begin with zeros |
| accumulated gradients | the sum over ranks | rank 0 has it, the others begin with zeros |
| statistics of an unsynchronized BatchNormalization | the mean over ranks | all have it |
| seeds of random layers | rank 0's | all have it, moved by the rank (`weights.synchronize`) |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.comm import watch
from tfdist.trainers import weights
from tfdist.trainers.logs import Globally, metric_variables, way_of
from tfdist.trainers.switchboard import Switchboard


def seeds_of(model: Any) -> list[Any]:
    """The variables of a model's random layers, which no file of Keras' holds."""
    return [v for _, v in weights.state_of(model) if v.path.endswith(weights.SEED)]


def accumulators_of(model: Any) -> list[Any]:
    """The variables in which optimizers add gradients up between updates."""
    return [v for _, v in weights.state_of(model) if v.path.endswith(weights.ACCUMULATOR)]


@contextmanager
def as_one(model: Any, board: Switchboard | None) -> Iterator[None]:
    """While entered, rank 0's variables are those of one process; all ranks enter. Without ranks nothing happens."""
    if board is None or board.comm.size == 1:
        yield
        return
    comm, accumulators = board.comm, accumulators_of(model)
    mine = [v.numpy() for v in accumulators]
    with watch.waiting(f"a checkpoint of {board.model_name!r}"):
        weights.average(comm, board.moving_statistics, f"{board.key}/moving")
        for i, (variable, value) in enumerate(zip(accumulators, mine, strict=True)):
            variable.assign(comm.all_reduce(tf.constant(value), f"{board.key}/accumulated/{i}"))
    try:
        with Globally(model, board):
            yield
    finally:
        for variable, value in zip(accumulators, mine, strict=True):
            variable.assign(value)


def leave_to_root(model: Any, board: Switchboard | None) -> None:
    """On going on: accumulated gradients are rank 0's."""
    if board is not None and board.comm.rank != 0:
        for variable in accumulators_of(model):
            variable.assign(np.zeros(variable.shape, variable.numpy().dtype))


def set_metrics(model: Any, board: Switchboard | None, values: list[np.ndarray]) -> bool:
    """Metrics as rank 0 has them from a checkpoint; whether they fit. All ranks call it, rank 0 with the values."""
    variables = metric_variables(model)
    fit = [tuple(v.shape) for v in variables] == [v.shape for v in values]
    ranks = board is not None and board.comm.size > 1
    if ranks:
        fit = bool(board.comm.broadcast(tf.constant(fit), 0, f"{board.key}/metrics/fit"))
    if not fit:
        return False
    for variable, value in zip(variables, values, strict=False):  # none on other ranks
        variable.assign(np.asarray(value, variable.numpy().dtype))
    if ranks:
        weights.broadcast(board.comm, variables, f"{board.key}/metrics/kept")
        for variable in variables if board.comm.rank != 0 else ():
            if way_of(variable) == "sum":
                variable.assign(np.zeros(variable.shape, variable.numpy().dtype))
    return True
