"""Holds layers of a model in parts on several devices (`split.parts`): which ones can be, and makes them so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.split.network import Network, Operation
from tfdist.split.parts import Part, Parts, cut, is_whole
from tfdist.trainers.split_layers import ByColumns, ByRows, columns_of
from tfdist.trainers.split_slots import joined
from tfdist.trainers.swap import swap

KINDS = {keras.layers.Dense: ByColumns, keras.layers.EinsumDense: ByColumns, keras.layers.Embedding: ByRows}
REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)  # that add up over parts
# Constraints by element, and those by norms along an axis.
CONSTRAINTS = (keras.constraints.NonNeg,)
NORMS = (keras.constraints.MaxNorm, keras.constraints.UnitNorm, keras.constraints.MinMaxNorm)


def weights_of(layer: Any) -> list[tuple[Any, int]]:
    """The weights of a layer that are to be cut, each with its axis."""
    if layer.__class__ is keras.layers.Embedding:
        return [(layer.embeddings, 0)]
    columns = columns_of(layer)
    found = [(layer.kernel, columns.kernel)]
    if layer.bias is not None and columns.bias is not None:
        found.append((layer.bias, columns.bias))
    return found


def checked(network: Network, wanted: Mapping[str, Sequence[str]]) -> list[tuple[Any, list[str]]]:
    """The layers of a mapping from names to devices, each with its devices.

    Raises:
      ValueError: one of them cannot be held in parts.
    """
    found = []
    for name, devices in wanted.items():
        layer = next(o.layer for o in network.operations if name in (o.name, o.layer.name))
        calls = [operation for operation in network.operations if operation.layer is layer]
        _check(name, calls, len(devices))
        found.append((layer, list(devices)))
    return found


def _check(name: str, calls: list[Operation], count: int) -> None:
    layer = calls[0].layer
    cls = layer.__class__
    what = f"layer {name!r} is mapped to {count} devices, but "
    instead = " Map it to one device in balance=."
    if cls not in KINDS:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"{what}it is a {cls.__name__}. Those of class {names} can be held in parts.{instead}")
    if layer.lora_enabled or layer.quantization_mode is not None:
        raise ValueError(f"{what}it has LoRA, or is quantized, which parts do not have.{instead}")
    if cls is not keras.layers.Embedding and len(calls) > 1:
        raise ValueError(
            f"{what}the model calls it {len(calls)} times: the gradients of the calls would be added up on one "
            f"device.{instead}"
        )
    if any(getattr(t, "sparse", False) for call in calls for t in call.node.input_tensors):
        raise ValueError(f"{what}its input is sparse.{instead}")
    if any(is_whole(variable) for variable in layer.variables):
        raise ValueError(f"{what}another distributed model holds it in parts already. Build the layer anew.")
    for variable, axis in weights_of(layer):
        rule, limit = variable.regularizer, variable.constraint
        if variable.shape[axis] < count:
            raise ValueError(f"{what}{variable.path} of shape {tuple(variable.shape)} has fewer parts.{instead}")
        if rule is not None and rule.__class__ not in REGULARIZERS:
            raise ValueError(
                f"{what}{variable.path} has the regularizer {_name(rule)}, of which it is not known how parts add up. "
                f"L1, L2 and L1L2 do.{instead}"
            )
        if limit is not None and not _by_part(limit, axis, len(variable.shape)):
            raise ValueError(
                f"{what}{variable.path} has the constraint {_name(limit)}, which may look across parts, cut along axis "
                f"{axis}. NonNeg, and norms along other axes, are possible.{instead}"
            )


def _by_part(limit: Any, axis: int, rank: int) -> bool:
    if limit.__class__ in CONSTRAINTS:
        return True
    along = getattr(limit, "axis", None)
    along = [along] if isinstance(along, int) else along
    return limit.__class__ in NORMS and along is not None and axis not in [a % rank for a in along]


def _name(rule: Any) -> str:
    return getattr(rule, "__name__", rule.__class__.__name__)


def hold(layers: Sequence[tuple[Any, list[str]]]) -> None:
    """Moves the weights of layers to their devices, a part to each, and lets the layers compute there."""
    for layer, devices in layers:
        for variable, axis in weights_of(layer):
            value = variable.value
            parts = [Part(variable, piece) for piece in cut(value, devices, axis)]
            joined(variable, Parts(parts, axis, value), variable.path)
        swap(layer, KINDS[layer.__class__])
