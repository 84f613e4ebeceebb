"""The operations of a Keras model in an order in which each comes after what it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm.fusion import nbytes
from tfdist.planner.partition import Unit

COPIES = 4  # of a trained weight: with its gradient and two slots


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a layer (or of a function of `keras.ops`) in the model.

    Attributes:
      name: of the layer; of its second call "name (2)".
      layer: the layer, or the operation that no layer is.
      takes: symbolic tensors, by id.
      gives: likewise.
      needs: positions of the operations it takes them from.
    """

    name: str
    layer: Any
    node: Any
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    needs: tuple[int, ...]

    @property
    def variables(self) -> list[Any]:
        """Keras variables of the layer, those of layers inside it too."""
        return list(self.layer.variables) if isinstance(self.layer, keras.layers.Layer) else []


class Network:
    """What a Sequential or functional model computes, operation by operation.

    Args:
      model: built.

    Raises:
      ValueError: it is neither, or was not built.
    """

    def __init__(self, model: keras.Model) -> None:
        functional = private.functional_of(model)
        if functional is None:
            unbuilt = isinstance(model, keras.Sequential)
            raise ValueError(
                f"Model {model.name!r} is a {type(model).__name__} "
                + (
                    "that was not built, so its operations are not known yet. Give it a keras.Input as first layer."
                    if unbuilt
                    else "with a call() of its own: what happens in there can not be cut. Build it as a functional "
                    "model, keras.Model(inputs, outputs), or train it with RingAllReduceStrategy."
                )
            )
        self.name, self.functional = model.name, functional
        self.inputs = [id(tensor) for tensor in functional.inputs]
        self.outputs = [id(tensor) for tensor in functional.outputs]
        self.operations: list[Operation] = []
        self._symbols = {id(t): t for t in functional.inputs}
        self.timed: dict[int, list[tuple[float, float]]] = {}  # by samples: what `profile.times` found
        made: dict[int, int] = {}
        calls: Counter[str] = Counter()
        for node in private.nodes_of(functional):
            takes = tuple(dict.fromkeys(id(t) for t in node.input_tensors))
            gives = tuple(id(t) for t in node.output_tensors)
            needs = tuple(sorted({made[t] for t in takes if t in made}))
            calls[node.operation.name] += 1
            count = calls[node.operation.name]
            name = node.operation.name + (f" ({count})" if count > 1 else "")
            self.operations.append(Operation(name, node.operation, node, takes, gives, needs))
            self._symbols.update({id(t): t for t in node.output_tensors})
            made.update(dict.fromkeys(gives, len(self.operations) - 1))
        # Operations that make the model's outputs, by position.
        self.ends = tuple(sorted({made[t] for t in self.outputs if t in made}))

    @property
    def names(self) -> list[str]:
        """Of all operations."""
        return [operation.name for operation in self.operations]

    def units(self, batch: int, times: list[tuple[float, float]] | None = None) -> list[Unit]:
        """What the planner is to know of the operations, with micro-batches of `batch` samples.

        A variable that several operations share counts at the first. Weights count four times: with their gradient
        and two slots, as under Adam. Of activations the outputs of operations count.

        Args:
          batch: samples.
          times: seconds of forward and backward of each; bytes of weights stand for them if not given.
        """
        seen: set[int] = set()
        units = []
        for position, operation in enumerate(self.operations):
            fresh = [v for v in operation.variables if id(v) not in seen]
            seen.update(id(v) for v in fresh)
            weights = sum(nbytes(v.value) * (COPIES if v.trainable else 1) for v in fresh)
            out = sum(self._bytes(t, batch) for t in operation.gives)
            forward, backward = times[position] if times is not None else (float(weights), 0.0)
            units.append(Unit(operation.name, forward, backward, weights, out, operation.needs, out))
        return units

    def _bytes(self, tensor: int, batch: int) -> int:
        symbol = self._symbols[tensor]
        count = 1
        for size in symbol.shape:
            count *= batch if size is None else size
        return count * tf.as_dtype(symbol.dtype).size
