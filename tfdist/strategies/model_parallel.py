"""One model over several devices: its layers cut into stages, batches into micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.cluster import World
from tfdist.comm import collective
from tfdist.planner.outlook import Report
from tfdist.planner.plan import Plan
from tfdist.split import planning
from tfdist.split.devices import checked, nearest
from tfdist.split.network import Network
from tfdist.strategies.one_process import OneProcessStrategy
from tfdist.tasks.first import First, connected
from tfdist.tasks.serving import serve_as
from tfdist.tf_config import from_env, need_workers
from tfdist.trainers import split as mixing
from tfdist.trainers import split_report as reporting
from tfdist.trainers.models import check_backend

START = 300.0  # seconds for all tasks of TF_CONFIG to come up


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

    With a `TF_CONFIG` of workers (and a chief, if it likes) the devices are those of all tasks, which run the same
    script. In worker/0, or the chief, this constructor waits for the others and what follows it runs; in the others it
    serves until that is done and raises SystemExit.

    Args:
      devices: names of TensorFlow's devices, one stage each; of other tasks as "/job:worker/task:1/GPU:0". A number: so
        many GPUs, or, where there are fewer, so many logical CPUs, which share their threads: they show that it works,
        not how fast; with TF_CONFIG the first so many of its devices. None: all GPUs, or where there is no GPU all
        logical CPUs, with TF_CONFIG one CPU a task.
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

      start_seconds: to wait for the other tasks of TF_CONFIG to come up.

    Raises:
      SystemExit: in a task that is not the first, when the job is over.
      ValueError: unknown devices, fewer than two, an argument of another form, or a wrong TF_CONFIG (the message names
        the key).
      RuntimeError: tasks did not come up in time, or the process belongs to another cluster already.
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
        start_seconds: float = START,
    ) -> None:
        check_backend()
        self.first = _first(start_seconds)
        self.devices = checked(devices, len(self.first.cluster.tasks()) if self.first else 0)
        asked = planning.wishes(self.devices, balance, microbatches, schedule, recompute, memory, batch_size)
        task = self.first.cluster.first if self.first else None
        # Calls of another task's device would be timed with their way there and back.
        self.wishes = dataclasses.replace(asked, timed_on=nearest(self.devices, task))
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
        with self.watching("plan"):
            return mixing.plan_of(model) or planning.plan(Network(model), self.wishes)

    def report(self, model: Any, batch_size: int | None = None) -> Report:
        """What the plan in use, or the one that `distribute` would make, brings; `print` it.

        For each stage its operations, parameters, bytes, seconds and what arrives over cuts; the step, samples/s and
        bubble that follow, and those that were measured in the last `fit`; and what data parallelism on the same
        devices would bring. `report.timeline("step.png")` draws a step. Operations are timed where that has not been
        done yet; the model stays as it is.

        Args:
          model: distributed, or not yet.
          batch_size: samples of a batch; None: as the strategy was told, else that of the last `fit`, else 32 a
            micro-batch.

        Raises:
          ValueError: as `distribute`.
        """
        with self.watching("report"):
            return reporting.report(model, self.wishes, planning.checked_batch(batch_size))

    def distribute(self, model: Any) -> Any:
        """Cuts a Sequential or functional model into stages; returns the same object, still of its own class.

        Raises:
          ValueError: a model with a `call` or `train_step` of its own, more devices than operations, a balance that
            does not fit it, or no cut that keeps within `memory`.
        """
        with self.watching("distribute"):
            return mixing.distribute(model, self, self.wishes)

    def watching(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Surrounds what uses the devices, `what` in messages.

        Raises:
          RuntimeError: a task of TF_CONFIG has ended; it is named.
        """
        return self.first.watching(what) if self.first else contextlib.nullcontext()


def _first(start: float) -> First | None:
    """This process as the first task of TF_CONFIG, None without one; other tasks serve and leave here.

    A launcher's ranks come first, as in `auto_strategy`: they are this process' own, where TF_CONFIG may be inherited.
    """
    found = from_env() if World.from_env().size == 1 else None
    if found is None:
        return None
    cluster, task = found
    need_workers(cluster)
    if task != cluster.first:
        raise SystemExit(serve_as(cluster, task))
    collective.stay_alone()
    return connected(cluster, start)
