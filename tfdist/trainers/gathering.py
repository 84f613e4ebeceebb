"""`predict`: each rank computes a part; the parts come back in the order of the input, on every rank."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.comm import watch
from tfdist.data.share import Share, cut_rows, rows
from tfdist.data.shares import bounds
from tfdist.trainers import handshake
from tfdist.trainers.feeding import describe_input
from tfdist.trainers.switchboard import Switchboard


def predict(model: Any, board: Switchboard, method: Any, call: dict[str, Any], gather: bool) -> Any:
    """Keras' `predict` on this rank's part; with `gather`, everybody's parts in input order.

    Raises:
        ValueError: the ranks called it differently, or outputs that cannot be joined (ragged, sparse).
    """
    comm = board.comm
    what = f"predict of {board.model_name!r}"
    facts = {"x": describe_input(call["x"]), "batch_size": str(call["batch_size"]), "steps": str(call["steps"])}
    handshake.compare(comm, what, {**facts, "gather": gather})
    if private.is_arrays(call["x"]) and call["steps"] is None:
        part, low, count = block(call["x"], comm.rank, comm.size)
        local_batch = max(1, math.ceil((call["batch_size"] or 32) / comm.size))
        with board.strategy.extended.feeding("local", quiet=True):
            mine = method(**{**call, "x": part, "batch_size": local_batch})
        mine = keras.tree.map_structure(lambda a: a[:count], mine)
        places = np.arange(low, low + count)
    else:
        with board.strategy.extended.feeding("predict", quiet=True) as seen:
            mine = method(**call)
        keep, places = placed(seen, comm.rank, comm.size)
        mine = keras.tree.map_structure(lambda a: a[keep], mine)
    if not gather:
        return mine
    with watch.waiting(what):
        return joined(board, mine, places)


def block(x: Any, rank: int, size: int) -> tuple[Any, int, int]:
    """(rows, index of the first, how many count): a rank's contiguous part of arrays, one row at least."""
    first = next(a for a in keras.tree.flatten(x) if a is not None)
    n = int(first.shape[0])
    low, high = bounds(n, rank, size)
    start, stop = (low, high) if high > low else (min(low, n - 1), min(low, n - 1) + 1)

    def take(a: Any) -> Any:
        if a is None:
            return None
        if hasattr(a, "iloc"):
            return a.iloc[start:stop]
        if isinstance(a, (tf.SparseTensor, tf.RaggedTensor)) or tf.is_tensor(a):
            return cut_rows(a, start, stop)
        return a[start:stop]

    return keras.tree.map_structure(take, x), low, high - low


class Seen:
    """Iterates shares for Keras' predict loop and remembers how many samples each held."""

    def __init__(self) -> None:
        self.dataset: Any = None
        self.together = True
        self.shares: list[tuple[int, int, int]] = []  # rows, of which count, of the batch's total

    @property
    def element_spec(self) -> Any:
        return self.dataset.element_spec

    def __iter__(self):
        for share in self.dataset:
            if isinstance(share, Share):
                self.shares.append((int(rows(share.data)), int(share.count), int(share.total)))
            else:
                self.shares.append((int(rows(share)),) * 3)
            yield share


def placed(seen: Seen, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(which local rows count, their index in the whole input), from the shares that a rank computed.

    Ranks that brought their own batches come one after the other.
    """
    keep: list[bool] = []
    places: list[int] = []
    offset = 0 if seen.together else rank << 40
    for held, count, total in seen.shares:
        keep += [True] * count + [False] * (held - count)
        low = bounds(total, rank, size)[0] if seen.together else 0
        places += range(offset + low, offset + low + count)
        offset += total if seen.together else count
    return np.array(keep, bool), np.array(places, np.int64)


def joined(board: Switchboard, mine: Any, places: np.ndarray) -> Any:
    """All ranks' rows, ordered by `places`."""
    comm, key = board.comm, board.key
    order = np.argsort(comm.all_gather(tf.constant(places, tf.int64), f"{key}/places").numpy(), kind="stable")
    flat = keras.tree.flatten(mine)
    parts = []
    for index, array in enumerate(flat):
        if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(
                f"Output {index} of {board.model_name!r} is a {type(array).__name__}, which the ranks cannot join. "
                "Call predict(..., gather=False) for this rank's part."
            )
        parts.append(comm.all_gather(tf.convert_to_tensor(array), f"{key}/outputs/{index}").numpy()[order])
    return keras.tree.pack_sequence_as(mine, parts)


def predict_on_batch(board: Switchboard, method: Any, x: Any) -> Any:
    """Predictions for one batch, computed by all ranks."""
    part, low, count = block(x, board.comm.rank, board.comm.size)
    mine = keras.tree.map_structure(lambda a: a[:count], method(part))
    with watch.waiting(f"predict_on_batch of {board.model_name!r}"):
        return joined(board, mine, np.arange(low, low + count))
