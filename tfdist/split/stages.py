"""Stages: some of a model's operations, each on a device, run on one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.split.network import Network, Operation

Tensors = dict[int, Any]  # by id of the symbolic tensor


class Stage:
    """Some operations of a model and the device they run on.

    Attributes:
      lane: the number of its device.
      arrives: what it takes from stages before it, or from the model's inputs.
      leaves: what it gives to stages after it, or as the model's outputs.
    """

    def __init__(
        self, index: int, lane: int, device: str, operations: Sequence[Operation], network: Network, last: bool
    ) -> None:
        self.index, self.lane, self.device, self.operations = index, lane, device, list(operations)
        made = {t for o in self.operations for t in o.gives}
        inside = {id(o) for o in self.operations}
        outside = {t for o in network.operations if id(o) not in inside for t in o.takes} | {*network.outputs}
        # The last stage computes the loss, so it takes outputs that others made.
        wanted = [t for o in self.operations for t in o.takes] + (network.outputs if last else [])
        self.arrives = list(dict.fromkeys(t for t in wanted if t not in made))
        self.leaves = [t for o in self.operations for t in o.gives if t in outside]

    @property
    def variables(self) -> list[Any]:
        """That its operations read."""
        return list({id(v): v for o in self.operations for v in o.variables}.values())

    @property
    def trainable(self) -> list[Any]:
        """Variables that its operations read and that are trained."""
        return [v for v in self.variables if v.trainable]

    @property
    def state(self) -> list[Any]:
        """All others, such as moving averages."""
        return [v for v in self.variables if not v.trainable]

    def brought(self, tensors: Tensors) -> Tensors:
        """Copies on the stage's device of what it takes, masks with them."""
        with tf.device(self.device):
            return {t: copied(tensors[t]) for t in self.arrives if t in tensors}

    def run(self, arrived: Tensors, training: bool) -> tuple[Tensors, list[Any]]:
        """Calls the operations one after the other.

        Returns:
          what leaves, and the losses that layers added (regularization of their outputs, `add_loss`).
        """
        known, added = dict(arrived), []
        with tf.device(self.device):
            for operation in self.operations:
                given = private.call_node(operation.node, known, training)
                known.update(zip(operation.gives, given, strict=True))
                if isinstance(operation.layer, keras.layers.Layer):
                    added += private.added_losses(operation.layer)
        return {t: known[t] for t in self.leaves}, added


def forward(stages: Sequence[Stage], network: Network, inputs: Any, training: bool) -> Any:
    """The model's outputs, in their structure, without micro-batches."""
    tensors: Tensors = dict(zip(network.inputs, private.standard_inputs(network.functional, inputs), strict=True))
    for stage in stages:
        leaving, _ = stage.run(stage.brought(tensors), training)
        tensors.update(leaving)
    return packed(network, [tensors[t] for t in network.outputs])


def packed(network: Network, outputs: list[Any]) -> Any:
    """Flat outputs in the structure in which the model gives them."""
    return keras.tree.pack_sequence_as(private.output_structure(network.functional), outputs)


def copied(value: Any) -> Any:
    """A tensor of one's own, with its mask: to have it on the present device, or to differentiate by it."""
    if value is None:
        return None
    copy = tf.nest.map_structure(tf.identity, value, expand_composites=True)
    if (mask := private.mask_of(value)) is not None:
        private.set_mask(copy, tf.identity(mask))
    return copy
