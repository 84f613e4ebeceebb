"""An optimizer's variables by the variable they belong to, and copies of an optimizer for other variables.

Keras' optimizers keep their slots in lists, one element for each variable they were built on (`_momentums[i]`); what
stands in no such list (iterations, the learning rate) is shared by all. So slots are known by the list's name, in the
user's optimizer and in its copies alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras

from tfdist import private

# Each element of a variable is updated from its own gradient and slots alone.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Lion", "Ftrl")
_NO_SLOTS = ("_variables", "_trainable_variables")


class Slots:
    """The variables of an optimizer that was built on `count` variables.

    Args:
      optimizer: built.
      count: of variables.
      apart: ids of the optimizer's variables that are to be passed over.

    Attributes:
      shared: those of all variables together, in the optimizer's order. The learning rate is none of them: the user's
        optimizer has it, and each update brings it along.
      rows: for each variable {name of the list: slot}.

    Raises:
      ValueError: a variable of the optimizer is in no list and no scalar, so nobody can say whose it is.
    """

    def __init__(self, optimizer: Any, count: int, apart: Collection[int] = ()) -> None:
        self.rows: list[dict[str, Any]] = [{} for _ in range(count)]
        listed = set(apart)
        for name, value in vars(optimizer).items():
            if name in _NO_SLOTS or not isinstance(value, list) or len(value) != count:
                continue
            if not all(v is None or isinstance(v, keras.Variable) for v in value):
                continue
            for row, slot in zip(self.rows, value, strict=True):
                if slot is not None:
                    row[name] = slot
                    listed.add(id(slot))
        rate = private.rate_of(optimizer)
        self.shared = [v for v in optimizer.variables if id(v) not in listed and v is not rate]
        strange = [v.path for v in self.shared if len(v.shape)]
        if strange:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {', '.join(strange)} outside of lists with one element for each "
                "variable, so tfdist cannot tell whose they are. Keep slots in such lists, as Keras' own "
                "optimizers do."
            )

    def of(self, name: str) -> list[Any]:
        """A list of slots by its name; None where a variable has none."""
        return [row.get(name) for row in self.rows]


def check(optimizer: Any) -> None:
    """Refuses what a parameter server cannot do, by name."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{kind} keeps one loss scale that every step changes, which asynchronous workers cannot share. Use the "
            'policy "mixed_bfloat16", which needs no loss scale.'
        )
    clips = [name for name in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(optimizer, name)]
    if clips and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"{kind} has both {clips[0]} and gradient_accumulation_steps. Workers clip what they send and the ps tasks "
            "accumulate, so the sum would never be clipped. Leave one of them out."
        )


def is_elementwise(optimizer: Any) -> bool:
    """Whether each element is updated by itself. Only of Keras' own optimizers that is known."""
    cls = optimizer.__class__
    return cls.__name__ in ELEMENTWISE and cls.__module__.startswith("keras.")


def stands_alone(optimizer: Any, variable: Any) -> bool:
    """Whether a variable must be updated whole, in its own shape, instead of within a stretch of many."""
    return (
        not is_elementwise(optimizer)
        or variable.constraint is not None
        or (bool(optimizer.weight_decay) and not private.decays(optimizer, variable))
    )


def copy_of(optimizer: Any, variables: list[Any], original: Callable[[int], int]) -> Any:
    """An optimizer with the same settings, built on `variables`, that neither clips nor unscales (workers do).

    Its learning rate is a variable, whatever the original's is. `original(i)` is the index of the variable that
    `variables[i]` stands for, which decides whether it decays.
    """
    changed = {**dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")), "learning_rate": 0.0}
    copy = optimizer.__class__.from_config({**optimizer.get_config(), **changed})
    if optimizer.weight_decay:
        known = private.trained_by(optimizer)
        spared = [v for i, v in enumerate(variables) if not private.decays(optimizer, known[original(i)])]
        if spared:
            copy.exclude_from_weight_decay(var_list=spared)
    copy.build(variables)
    return copy
