"""Logs over all ranks' data: metrics summed in their variables, so every rank reports the exact, same number."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.comm import watch
from tfdist.trainers.switchboard import Switchboard


def metric_variables(model: keras.Model) -> list[Any]:
    """The variables of all metrics of a model, each once, in an order that all ranks share."""
    seen: dict[int, Any] = {}
    for metric in model.metrics:
        for variable in metric.variables:
            seen.setdefault(id(variable), variable)
    return list(seen.values())


class Globally:
    """While entered, the metrics' variables hold what all ranks saw together; on exit, this rank's part again."""

    def __init__(self, model: keras.Model, board: Switchboard) -> None:
        self._variables = metric_variables(model)
        self._board = board
        self._mine: list[np.ndarray] = []

    def __enter__(self) -> None:
        comm, key = self._board.comm, self._board.key
        self._mine = [v.numpy() for v in self._variables]
        with watch.waiting(f"the metrics of {self._board.model_name!r}"):
            for way in ("sum", "mean", "root"):
                chosen = [i for i, v in enumerate(self._variables) if way_of(v) == way]
                if not chosen:
                    continue
                flat = np.concatenate([self._mine[i].astype(np.float64).reshape(-1) for i in chosen])
                if way == "root":
                    total = comm.broadcast(tf.constant(flat), 0, f"{key}/metrics/root").numpy()
                else:
                    total = comm.all_reduce(tf.constant(flat), f"{key}/metrics/{way}", "sum").numpy()
                    total = total / comm.size if way == "mean" else total
                start = 0
                for i in chosen:
                    size = self._mine[i].size
                    self._variables[i].assign(_shaped(total[start : start + size], self._mine[i]))
                    start += size

    def __exit__(self, *exc: object) -> None:
        for variable, value in zip(self._variables, self._mine, strict=True):
            variable.assign(value)


def way_of(variable: Any) -> str:
    """How a metric's variables on all ranks become one: their "sum", their "mean", or that of the "root", rank 0."""
    aggregation = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "mean": "mean"}.get(aggregation, "root")


def _shaped(flat: np.ndarray, like: np.ndarray) -> np.ndarray:
    if like.dtype.kind in "iu":
        flat = np.rint(flat)
    return flat.reshape(like.shape).astype(like.dtype)


def agree(logs: Any, metrics: dict[str, Any], board: Switchboard) -> Any:
    """Logs of a step, with global metrics, and every other number averaged over ranks.

    What a custom step returns beside its metrics is the value of this rank's last batch; callbacks that decide
    by it would decide differently on each rank.
    """
    if not isinstance(logs, dict):
        return logs
    # Keras' own group of the metrics of compile() reports a dict, when a custom step asks it.
    agreed = {k: agree(v, metrics, board) if isinstance(v, dict) else metrics.get(k, v) for k, v in logs.items()}
    other = [k for k in sorted(logs) if k not in metrics and _is_number(logs[k])]
    if other:
        mine = tf.constant([float(_plain(logs[k])) for k in other], tf.float64)
        with watch.waiting(f"the logs of {board.model_name!r}"):
            mean = board.comm.all_reduce(mine, f"{board.key}/logs", "sum").numpy() / board.comm.size
        agreed.update(zip(other, (float(m) for m in mean), strict=True))
    return agreed


def _is_number(value: Any) -> bool:
    return np.asarray(_plain(value)).dtype.kind in "biuf" and np.ndim(_plain(value)) == 0


def _plain(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value
