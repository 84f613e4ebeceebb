"""From what the user passes to `fit` and `evaluate` to this rank's shares.

Arrays are cut before Keras sees them, so that no rank gathers the others' rows; datasets, PyDatasets and
generators go through Keras' own adapters first and are cut when Keras asks the strategy to distribute them.
"""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.data import arrays, pipelines
from tfdist.data.share import cut_rows, rows
from tfdist.data.shares import bounds, check_batch, describe
from tfdist.trainers import handshake, keeping
from tfdist.trainers.switchboard import Switchboard


def batch_of(call: dict[str, Any]) -> int | None:
    """The global batch of a `fit` call on arrays; None when the dataset decides."""
    if not private.is_arrays(call["x"], call["y"], call.get("sample_weight")):
        return None
    return call["batch_size"] or 32


def first_rows(call: dict[str, Any]) -> int | None:
    """Samples in the first global batch of arrays: plain Keras builds late models for it. None for datasets."""
    if call["x"] is None or not private.is_arrays(call["x"], call["y"], call.get("sample_weight")):
        return None
    leaf = next(a for a in keras.tree.flatten(call["x"]) if a is not None)
    return min(call["batch_size"] or 32, int(leaf.shape[0]))


def describe_input(x: Any, y: Any = None, sample_weight: Any = None) -> str:
    """What an input is, in words that must agree on all ranks."""
    if x is None:
        return "none"
    if private.is_arrays(x, y, sample_weight):
        leaf = next(a for a in keras.tree.flatten(x) if a is not None)
        return f"arrays of {leaf.shape[0]} samples"
    return type(x).__name__.lstrip("_")


def checksum(x: Any, y: Any) -> str:
    """Of some rows of arrays in memory, by which ranks notice that each brought a part of its own; "" for others."""
    mark = 0
    for part in (x, y):
        for leaf in keras.tree.flatten(part)[:1]:
            if isinstance(leaf, np.ndarray) and not arrays.on_disk(leaf) and len(leaf) and leaf.dtype != object:
                rows_ = leaf[np.unique(np.linspace(0, len(leaf) - 1, 16).astype(int))]
                mark = zlib.crc32(np.ascontiguousarray(rows_).tobytes(), mark)
    return f"{mark:08x}" if mark else ""


def fit_arguments(model: Any, board: Switchboard, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which Keras' `fit` is called on this rank.

    Raises:
        ValueError: the ranks called `fit` differently, or the batch does not give each rank a sample.
    """
    call = dict(call)
    if call["validation_split"] and call["validation_data"] is None:
        parts = (call["x"], call["y"], call["sample_weight"])
        (call["x"], call["y"], call["sample_weight"]), call["validation_data"] = private.validation_split(
            parts, call["validation_split"]
        )
        call["validation_split"] = 0.0
    call["x"] = pipelines.open_ended(call["x"])
    call["validation_data"] = pipelines.open_ended(call["validation_data"])
    validation = _triple(call["validation_data"])
    board.rows = first_rows(call)
    facts = {
        "x": describe_input(call["x"], call["y"], call["sample_weight"]),
        "validation_data": describe_input(*validation),
        **{k: str(call[k]) for k in ("batch_size", "epochs", "initial_epoch", "steps_per_epoch")},
        **{k: str(call[k]) for k in ("validation_steps", "validation_batch_size", "validation_freq", "shuffle")},
        "x's rows (pass all of them on all ranks: tfdist cuts)": checksum(call["x"], call["y"]),
        "steps_per_execution": model.steps_per_execution,
        "run_eagerly": bool(model.run_eagerly),
        "_seed": private.global_seed(),
        **keeping.facts(model),
    }
    if not private.is_arrays(*validation) or validation[0] is None:
        facts["validation_data"] = "none" if validation[0] is None else "a dataset"
    of_root = handshake.compare(board.comm, f"fit of {board.model_name!r}", facts)
    seed = of_root["_seed"]
    keeping.learn(model, of_root)
    validation_batch = call["validation_batch_size"] or call["batch_size"]
    if private.is_arrays(call["x"], call["y"], call["sample_weight"]):
        with handshake.seed_of_root(seed):
            cut = arrays.shares(
                call["x"],
                call["y"],
                call["sample_weight"],
                batch_size=call["batch_size"],
                steps=call["steps_per_epoch"],
                shuffle=call["shuffle"],
                class_weight=call["class_weight"],
                rank=board.comm.rank,
                size=board.comm.size,
            )
        call.update(x=cut.dataset, y=None, sample_weight=None, batch_size=None, shuffle=False, class_weight=None)
        board.global_batch = cut.batch
        if call["verbose"] != 0:
            board.tell(describe(cut.batch, board.comm.size))
    else:
        board.global_batch = None
        handshake.share_python_random(board.comm)
        call["shuffle"] = call["shuffle"] if isinstance(call["x"], keras.utils.PyDataset) else False
    if validation[0] is not None and private.is_arrays(*validation):
        call["validation_data"] = _evaluation(validation, validation_batch, call["validation_steps"], board)
        call["validation_batch_size"] = None
    return call


def evaluate_arguments(model: Any, board: Switchboard, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which Keras' `evaluate` is called on this rank."""
    call = dict(call)
    call["x"] = pipelines.open_ended(call["x"])
    parts = (call["x"], call["y"], call["sample_weight"])
    board.rows = first_rows(call)
    facts = {"x": describe_input(*parts), "batch_size": str(call["batch_size"]), "steps": str(call["steps"])}
    handshake.compare(board.comm, f"evaluate of {board.model_name!r}", facts)
    if private.is_arrays(*parts):
        call["x"] = _evaluation(parts, call["batch_size"], call["steps"], board)
        call.update(y=None, sample_weight=None, batch_size=None)
    return call


def _evaluation(parts: tuple, batch: int | None, steps: int | None, board: Switchboard) -> tf.data.Dataset:
    x, y, sample_weight = parts
    return arrays.shares(
        x, y, sample_weight, batch_size=batch, steps=steps, rank=board.comm.rank, size=board.comm.size
    ).dataset


def _triple(data: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) of what was passed as `validation_data`."""
    if not isinstance(data, (tuple, list)):
        return data, None, None
    return (*data, None, None)[:3]  # type: ignore[return-value]


def batch_arguments(board: Switchboard, call: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of the arguments of `train_on_batch` or `test_on_batch`.

    Raises:
        ValueError: fewer rows than ranks.
    """
    call = dict(call)
    names = [k for k in ("x", "y", "sample_weight") if call.get(k) is not None]
    given = {k: keras.tree.map_structure(tf.convert_to_tensor, call[k]) for k in names}
    total = int(rows(given["x"]))
    check_batch(total, board.comm.size, "the number of rows")
    low, high = bounds(total, board.comm.rank, board.comm.size)
    call.update({k: cut_rows(v, low, high) for k, v in given.items()})
    return call


def symbol(spec: Any, batch: int | None = None) -> Any:
    """What stands for (a leaf of) a global batch when Keras builds a model symbolically.

    Args:
        batch: its rows where they are known; a spec of a rank's share may have the share's.
    """
    if isinstance(spec, tf.experimental.Optional) or not hasattr(spec, "shape"):
        return None
    shape = tuple(spec.shape)
    if batch is not None and shape:
        shape = (batch, *shape[1:])
    return keras.KerasTensor(shape, spec.dtype.name, sparse=isinstance(spec, tf.SparseTensorSpec))
