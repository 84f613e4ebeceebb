"""One model over several devices: its layers cut into stages, batches into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.planner.plan import Plan
from tfdist.split import planning
from tfdist.split.devices import checked
from tfdist.split.network import Network
from tfdist.strategies.one_process import OneProcessStrategy
from tfdist.trainers import split as mixing
from tfdist.trainers.models import check_backend


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
      balance: where to cut. "time": so that the slowest stage is as fast as can be, by the time of each operation,
        measured on made-up input when the model is distributed, and of copies between devices; "memory": so that the
        largest stage is as small as can be; "parameters": by bytes of weights. Or a list: so many operations to each
        stage. Or a mapping from names of layers to devices (names, or numbers in `devices`): a layer that is not named
        is where the last one is that it takes from, so naming the first layer of a branch moves the branch, which then
        runs beside others. Several devices for a Dense, EinsumDense or Embedding: its weights are in parts on them, by
        columns or rows, and the layer is otherwise on the first. Or a `tfdist.Plan`.
      microbatches: of a batch; "auto": four for each stage after the first.
      schedule: "1f1b", which keeps the activations of few micro-batches, or "gpipe".
      recompute: whether stages that would keep the activations of several micro-batches compute them again instead,
        which takes the time of a forward and leaves gradients equal, dropout included.
      memory: bytes that a device may take for weights, gradients, slots and activations; cuts that take more are left
        out.
      batch_size: of `fit`, for which times and memory are planned; None: 32 samples a micro-batch.

    Raises:
      ValueError: unknown devices, fewer than two, or an argument of another form.
    """

    def __init__(
        self,
        devices: Sequence[str] | int | None = None,
        *,
        balance: str | Sequence[int] | dict[str, str | int | Sequence[str | int]] | Plan = "time",
        microbatches: int | str = "auto",
        schedule: str = "1f1b",
        recompute: bool = False,
        memory: float | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_backend()
        self.devices = checked(devices)
        self.wishes = planning.wishes(
            self.devices, balance, microbatches, schedule, recompute, memory, batch_size
        )
        super().__init__(self.devices[0])

    @property
    def microbatches(self) -> int:
        """Of a batch."""
        return self.wishes.microbatches

    def plan(self, model: Any) -> Plan:
        """Where a model is cut, or will be: nothing is changed.

        Raises:
          ValueError: as `distribute`.
        """
        return mixing.plan_of(model) or planning.plan(Network(model), self.wishes)

    def distribute(self, model: Any) -> Any:
        """Cuts a Sequential or functional model into stages; returns the same object, still of its own class.

        Raises:
          ValueError: a model with a `call` or `train_step` of its own, more devices than operations, a balance that
            does not fit it, or no cut that keeps within `memory`.
        """
        return mixing.distribute(model, self, self.wishes)
