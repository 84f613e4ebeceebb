"""Embeddings under a parameter server: which are held by rows, and how their layer looks rows up."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.ps.pieces import size_of
from tfdist.ps.slots import stands_alone
from tfdist.ps.work import current
from tfdist.trainers.swap import has, swap

SMALLEST = 1 << 16  # bytes of a table; below, to look for rows takes longer than to send all


class EmbeddingByRows:
    """Mixed into `keras.layers.Embedding`: in a worker's step the rows of the batch come from the ps tasks."""

    def call(self, inputs: Any) -> Any:
        collected = current()
        if collected is None or self.lora_enabled or not collected.tables.holds(self.embeddings):
            return super().call(inputs)
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        rows = collected.tables.look_up(self.embeddings, tf.convert_to_tensor(inputs))
        return keras.ops.cast(rows, self.compute_dtype)


def adopt(model: Any) -> None:
    """Lets the embeddings of a model look rows up. Layers of a class derived from Embedding stay as they are."""
    for layer in private.layers_of(model):
        if layer.__class__ is keras.layers.Embedding:
            swap(layer, EmbeddingByRows)


def tables_of(model: Any, variables: list[Any]) -> list[int]:
    """Indices of the variables that can be held by rows."""
    index = {id(v): i for i, v in enumerate(variables)}
    found = set()
    for layer in private.layers_of(model):
        if not has(layer, EmbeddingByRows) or not layer.built or layer.lora_enabled or layer.quantization_mode:
            continue
        table = layer.embeddings
        if id(table) in index and size_of(table) >= SMALLEST and not stands_alone(model.optimizer, table):
            found.add(index[id(table)])
    return sorted(found)
