"""Weights and optimizer state: the same on every rank before the first step, whatever happened before it.

Ranks compare the shapes first (a difference is an error that names the variable), then one checksum each; only
where those differ do rank 0's values travel, packed. That covers different seeds, `load_weights` on one rank,
and a job that BackupAndRestore resumes on rank 0.
"""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.comm import watch
from tfdist.comm.agreement import agree
from tfdist.comm.collective import Collective
from tfdist.trainers.switchboard import Switchboard, unnumbered

SEED = "seed_generator_state"
ACCUMULATOR = "gradient_accumulator"  # each rank's own sum since the last update: different by right


def optimizers_of(model: keras.Model) -> list[tuple[str, Any]]:
    """(attribute name, optimizer) of every optimizer that a model holds, by name; several in a GAN."""
    found: dict[int, tuple[str, Any]] = {}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found[id(optimizer)] = ("optimizer", optimizer)
    for name, value in sorted(vars(model).items()):
        if name.startswith("_self_"):  # TensorFlow's own bookkeeping of the same objects
            continue
        for place, leaf in _leaves(name, value):
            if isinstance(leaf, keras.optimizers.Optimizer):
                found.setdefault(id(leaf), (place.lstrip("_"), leaf))
    return list(found.values())


def _leaves(name: str, value: Any):
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}.{index}", item)
    else:
        yield name, value


def state_of(model: keras.Model) -> list[tuple[str, Any]]:
    """(name, variable) of everything that training changes, each variable once."""
    seen: set[int] = set()
    state = []
    named = [(v.path, v) for v in model.variables]
    for name, optimizer in optimizers_of(model):
        named += [(f"{name}/{v.path}", v) for v in optimizer.variables]
    for name, variable in named:
        if id(variable) not in seen:
            seen.add(id(variable))
            state.append((name, variable))
    return state


def synchronize(model: keras.Model, board: Switchboard) -> bool:
    """Gives every rank the state of rank 0; returns whether anything differed.

    Raises:
        ValueError: on every rank, when the ranks' variables differ in number, name, shape or type.
    """
    comm = board.comm
    state = state_of(model)
    seeds = [v for _, v in state if v.path.endswith(SEED)]
    plain = [(n, v) for n, v in state if not v.path.endswith((SEED, ACCUMULATOR))]
    with watch.waiting(f"the comparison of the weights of {board.model_name!r}"):
        rows = [(unnumbered(n), tuple(v.shape), str(v.dtype)) for n, v in state]
        agree(comm, rows, f"variables of {board.key}")
        values = [np.asarray(v.numpy()) for _, v in plain]
        mark = 0
        for value in values:
            mark = zlib.crc32(np.ascontiguousarray(value).tobytes(), mark)
        marks = comm.all_gather(tf.constant([mark], tf.int64), f"{board.key}/marks").numpy()
        differed = bool((marks != marks[0]).any())
        if differed:
            broadcast(comm, [v for _, v in plain], f"{board.key}/weights")
        _spread_seeds(comm, seeds, f"{board.key}/seeds")
    return differed


def synchronize_once(model: keras.Model, board: Switchboard) -> None:
    """`synchronize`, unless that was done before or the model has no weights yet: where no `fit` does it."""
    if not board.synchronized and model.built:
        synchronize(model, board)
        board.synchronized = True


def broadcast(comm: Collective, variables: list[Any], name: str) -> None:
    """Rank 0's values to all, one tensor for each element type."""
    by_type: dict[str, list[Any]] = {}
    for variable in variables:
        by_type.setdefault(str(variable.dtype), []).append(variable)
    for dtype, group in by_type.items():
        if dtype == "string":
            continue  # lookup tables and the like: constants, no training state
        flat = np.concatenate([np.asarray(v.numpy()).reshape(-1) for v in group])
        got = comm.broadcast(tf.constant(flat), 0, f"{name}/{dtype}").numpy()
        if comm.rank == 0:
            continue
        start = 0
        for variable in group:
            size = int(np.prod(variable.shape, dtype=np.int64))
            variable.assign(got[start : start + size].reshape(variable.shape))
            start += size


def _spread_seeds(comm: Collective, seeds: list[Any], name: str) -> None:
    """Random layers: rank r continues from rank 0's seed, moved by r, so that masks differ between ranks.

    Rank 0 keeps its own, which is what a saved file and a run with one process have.
    """
    if not seeds:
        return
    root = comm.broadcast(tf.constant(np.stack([np.asarray(v.numpy()) for v in seeds]), tf.int64), 0, name).numpy()
    for variable, (seed, counter) in zip(seeds, root, strict=True):
        moved = (int(seed) + comm.rank * 0x9E3779B1) % 2**31 if comm.rank else int(seed)
        variable.assign(np.array([moved, counter]))


def average(comm: Collective, variables: list[Any], name: str) -> None:
    """The mean over ranks of floating variables, in place: BatchNormalization statistics of unsynchronized layers."""
    if not variables:
        return
    flat = np.concatenate([np.asarray(v.numpy(), np.float64).reshape(-1) for v in variables])
    mean = comm.all_reduce(tf.constant(flat), name, "sum").numpy() / comm.size
    start = 0
    for variable in variables:
        size = int(np.prod(variable.shape, dtype=np.int64))
        variable.assign(mean[start : start + size].reshape(variable.shape).astype(variable.numpy().dtype))
        start += size


def resumed_epoch(model: keras.Model, board: Switchboard) -> None:
    """The epoch that BackupAndRestore found on rank 0, on every rank."""
    epoch = tf.constant(private.get_initial_epoch(model), tf.int64)
    agreed = int(board.comm.broadcast(epoch, 0, f"{board.key}/epoch"))
    if agreed != private.get_initial_epoch(model):
        private.set_initial_epoch(model, agreed)
