"""One model over several devices: its layers cut into stages, batches into micro-batches."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from tfdist.planner import partition
from tfdist.planner.schedule import live, order_of
from tfdist.split import profile
from tfdist.split.devices import checked, checked_name, separated
from tfdist.strategies.one_process import OneProcessStrategy
from tfdist.trainers import split as mixing
from tfdist.trainers.models import check_backend

MICROS_PER_WAIT = 4  # "auto": micro-batches for each stage after the first, so that a fifth of the time is waiting


class ModelParallelStrategy(OneProcessStrategy):
    """Model parallel training: each device holds and computes a stretch of the model's layers.

    Weights, optimizer slots, forward and backward of a stage are on its device; a batch goes through in micro-batches,
    so that stages work at the same time (`tfdist.planner.schedule`). The gradient is that of the unsplit model on the
    whole batch. BatchNormalization normalizes each micro-batch by itself, as in any pipeline.

    ```python
    strategy = tfdist.ModelParallelStrategy(["/GPU:0", "/GPU:1"])
    with strategy.scope():
        model = strategy.distribute(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64)
    ```

    Args:
      devices: names of TensorFlow's devices, one stage each. A number: so many GPUs, or, where there are fewer, so
        many logical CPUs, which share their threads: they show that it works, not how fast. None: all GPUs, or all
        logical CPUs where there is no GPU.
      balance: where to cut, so that the slowest stage is as fast as can be. "time": by the time of each operation,
        measured on made-up input when the model is distributed; "parameters": by bytes of weights. Or a list: so many
        operations to each stage. Or a mapping from names of layers to devices: a named layer and what follows it, up to
        the next named one, on that device. Several devices for a Dense, EinsumDense or Embedding: its weights in parts
        on them, by columns or rows; what else there is of it, and what follows, on the first.
      microbatches: of a batch; "auto": four for each stage after the first.
      schedule: "1f1b", which keeps the activations of few micro-batches, or "gpipe".

    Raises:
      ValueError: unknown devices, fewer than two, or an argument of another form.
    """

    def __init__(
        self,
        devices: Sequence[str] | int | None = None,
        *,
        balance: str | Sequence[int] | dict[str, str | Sequence[str]] = "time",
        microbatches: int | str = "auto",
        schedule: str = "1f1b",
    ) -> None:
        check_backend()
        self.devices = checked(devices)
        self.microbatches = _count(microbatches, MICROS_PER_WAIT * (len(self.devices) - 1))
        self._live = live(order_of(schedule, len(self.devices), self.microbatches))
        balance, self.parts = separated(balance, self.devices)
        self.schedule, self.balance = schedule, _form(balance, self.devices)
        super().__init__(self.devices[0])

    def distribute(self, model: Any) -> Any:
        """Cuts a Sequential or functional model into stages; returns the same object, still of its own class.

        Raises:
          ValueError: a model with a `call` or `train_step` of its own, more devices than operations, or a balance that
            does not fit it.
        """
        return mixing.distribute(model, self, self._plan, self.microbatches, self.schedule)

    def _plan(self, network: Any) -> tuple[tuple[int, ...], list[str]]:
        stages = len(self.devices)
        measured = profile.seconds(network, self.devices[0]) if self.balance == "time" else None
        units = network.units(1, measured)
        if isinstance(self.balance, str):
            return partition.best_cut(units, stages, self._live).bounds, self.devices
        if isinstance(self.balance, dict):
            return self._named(units)
        if sum(self.balance) != len(units) or min(self.balance) < 1:
            names = ", ".join(unit.name for unit in units)
            raise ValueError(
                f"balance is {self.balance}, expected {stages} numbers of at least 1 that add up to the model's "
                f"{len(units)} operations: {names}."
            )
        return partition.bounds_of(self.balance), self.devices

    def _named(self, units: list[partition.Unit]) -> tuple[tuple[int, ...], list[str]]:
        names = [unit.name for unit in units]
        unknown = [name for name in self.balance if name not in names]
        if unknown:
            raise ValueError(f"balance names {', '.join(unknown)}, expected layers of the model: {', '.join(names)}.")
        bounds, devices = [0], [self.balance.get(names[0], self.devices[0])]
        for position, name in enumerate(names):
            device = self.balance.get(name, devices[-1])
            if device != devices[-1]:
                bounds.append(position)
                devices.append(device)
        if len({*devices, *itertools.chain(*self.parts.values())}) < 2:
            raise ValueError(
                f"balance {self.balance} puts all layers on {devices[0]}; name a layer for another device. The model's "
                f"layers are {', '.join(names)}."
            )
        return (*bounds, len(names)), devices


def _count(microbatches: Any, auto: int) -> int:
    if microbatches == "auto":
        return auto
    try:
        count = 0 if isinstance(microbatches, bool) else operator.index(microbatches)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f'microbatches is {microbatches!r}, expected a number of at least 1, or "auto".')
    return count


def _form(balance: Any, devices: Sequence[str]) -> Any:
    """A balance as a word, a list of numbers, or a mapping from names to full names of devices."""
    if isinstance(balance, str) and balance in ("time", "parameters"):
        return balance
    if isinstance(balance, dict) and balance and all(isinstance(device, str) for device in balance.values()):
        return {name: checked_name(device, devices) for name, device in balance.items()}
    with contextlib.suppress(TypeError):
        if not isinstance(balance, (str, dict)) and len(balance) == len(devices):
            return [operator.index(count) for count in balance]
    raise ValueError(
        f'balance is {balance!r}, expected "time", "parameters", {len(devices)} numbers of operations (one for each '
        "device), or a mapping from names of layers to devices, or to several devices each."
    )
