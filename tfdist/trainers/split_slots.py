"""The slots of an optimizer for weights in parts (`split.parts`): of parts, shown and saved as those of whole weights.

The optimizer is built on parts, so its lists hold slots of parts, on their devices. In its list of variables, which is
what is saved, stands one for each slot that plain Keras would have; its value is that of the parts'.
"""

from __future__ import annotations

import itertools
from typing import Any

import keras
import tensorflow as tf

from tfdist import private, private_variables
from tfdist.ps.slots import ELEMENTWISE, Slots, is_elementwise
from tfdist.split.parts import Part, Parts, Whole, cut, expanded, is_whole, parts_of
from tfdist.trainers.swap import swap


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError where an optimizer's update of a part is not the part of its update."""
    if hasattr(optimizer, "inner_optimizer") or is_elementwise(optimizer):
        return
    raise ValueError(
        f"layers are held in parts on several devices, but {type(optimizer).__name__} may look at a whole weight. "
        f"Those that update each element by itself can be used: {', '.join(ELEMENTWISE)}."
    )


def cut_slots(optimizer: Any) -> None:
    """Makes an optimizer that was built on whole weights one of their parts.

    Its variables stay the same objects; its lists get their parts.
    """
    trained = private.trained_by(optimizer)
    if not optimizer.built or not any(is_whole(variable) for variable in trained):
        return
    rows = [] if hasattr(optimizer, "inner_optimizer") else Slots(optimizer, len(trained)).rows
    for name in dict.fromkeys(name for row in rows for name in row):
        each = [_parts_of_slot(row.get(name), variable) for variable, row in zip(trained, rows, strict=True)]
        vars(optimizer)[name] = list(itertools.chain.from_iterable(each))
    private_variables.train_on(optimizer, expanded(trained))


def join_slots(optimizer: Any) -> None:
    """Puts one variable for all parts of a slot where the first of them stands in the optimizer's list."""
    trained = private.trained_by(optimizer)
    if not any(isinstance(variable, Part) for variable in trained):
        return
    pieces: dict[tuple[str, int], list[Any]] = {}
    for variable, row in zip(trained, Slots(optimizer, len(trained)).rows, strict=True):
        for name, slot in row.items():
            if isinstance(variable, Part):
                pieces.setdefault((name, id(variable.whole)), []).append((slot, variable.whole.value.axis))
    instead: dict[int, Any] = {}
    for found in pieces.values():
        first, axis = found[0]
        instead.update((id(slot), None) for slot, _ in found)
        with tf.init_scope():
            whole = keras.Variable(0, dtype=first.dtype, trainable=False, name=first.name)
        instead[id(first)] = joined(whole, Parts([slot for slot, _ in found], axis, first.value), first.path)
    listed = [instead.get(id(v), v) for v in optimizer.variables]
    private_variables.list_variables(optimizer, [v for v in listed if v is not None])


def joined(variable: Any, parts: Parts, path: str) -> Any:
    """Makes a Keras variable one that is kept in parts."""
    swap(variable, Whole)
    private_variables.become(variable, parts, path)
    return variable


def _parts_of_slot(slot: Any, variable: Any) -> list[Any]:
    parts = parts_of(variable)
    if slot is None or not is_whole(variable):
        return [slot] * len(parts)
    axis, value, found = variable.value.axis, slot.value, []
    for piece in cut(value, [part.value.device for part in parts], axis):
        found.append(keras.Variable(piece, dtype=slot.dtype, trainable=False, name=slot.name))
        private_variables.become(found[-1], piece, slot.path)
    joined(slot, Parts(found, axis, value), slot.path)
    return found
