"""What a plan will bring: the time of a step, waiting, memory, and whether data parallelism would be faster. Pure.

Every figure comes from few measured ones, by formulas that the report prints beside them::

    measured    f_u, b_u    seconds of forward and backward of operation u on a micro-batch of s samples, one device
                B           bytes per second over a cut, each way
    stage       F, G        sums of f_u and b_u over its operations; G and F again where activations are recomputed
    step        T           of the schedule, simulated with F, G and (bytes over a cut) / B; the optimizer's update and
                            the loss are left out
    bubble      1 - (sum over stages of m (F + G)) / (p T)         m micro-batches, p devices
    samples/s   N / T                                              N samples a batch
    memory      of a device: the sum over its stages of weights + gradients + slots + activations kept

Against data parallelism on the same p devices, each with the whole model and N / p samples::

    T'       = m / p * (sum over u of (f_u + b_u)) + 2 (p - 1) / p * (bytes of gradients) / B
    memory'  = all weights + gradients + slots + activations of m / p micro-batches

The second term of T' is the ring's all-reduce, not hidden behind the backward pass. That m / p micro-batches are
computed as one leaves the time out which larger pieces gain. Where m does not divide N, s is rounded up in both.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfdist.planner.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

ABOUT = 0.1  # two predictions that differ by no more than this share are called about equal


@dataclass(frozen=True)
class Held:
    """What an operation has on its device all the time.

    Attributes:
        parameters: their number, those included that are not trained.
        weights: bytes.
        gradients: bytes; of those that are trained.
        slots: bytes of the optimizer's variables for them.
    """

    parameters: int = 0
    weights: int = 0
    gradients: int = 0
    slots: int = 0

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.slots


@dataclass(frozen=True)
class Setting:
    """How a plan is to be carried out.

    Attributes:
        devices: names, by number.
        schedule: "1f1b" or "gpipe".
        microbatches: of a batch.
        batch: samples of a batch.
        samples: of the micro-batch that the units' seconds and bytes are of.
        bytes_per_second: over a cut, each way.
        recompute: whether stages that would keep several micro-batches' activations compute forwards again.
        memory: bytes that a device may take; infinite where nothing was said.
        sources: (what, where it comes from) of figures that were measured or assumed: "bandwidth", "times", "slots".
    """

    devices: tuple[str, ...]
    schedule: str
    microbatches: int
    batch: int
    samples: int
    bytes_per_second: float
    recompute: bool = False
    memory: float = math.inf
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StageOutlook:
    """A stage, and what it costs.

    Attributes:
        device: its number.
        operations: names, in order.
        held: weights, gradients and slots.
        live: of how many micro-batches at a time something is kept for the backward.
        kept_bytes: what is kept of each of them: the outputs of the operations, or with `again` what the stage took.
        transient_bytes: with `again` the outputs of the operations for the one micro-batch in its backward, else 0.
        forward: seconds of a micro-batch.
        backward: likewise, without the forward that `again` adds to it.
        again: whether forwards are computed again before backwards.
        arriving: (stage before it, bytes that come from there) of a micro-batch; gradients of as many go back.
    """

    device: int
    operations: tuple[str, ...]
    held: Held
    live: int
    kept_bytes: int
    transient_bytes: int
    forward: float
    backward: float
    again: bool
    arriving: tuple[tuple[int, int], ...]

    @property
    def activations(self) -> int:
        """Bytes of activations kept at a time, at most."""
        return self.live * self.kept_bytes + self.transient_bytes

    @property
    def bytes(self) -> int:
        """All that it takes of its device's memory."""
        return self.held.bytes + self.activations

    @property
    def back(self) -> float:
        """Seconds of the backward of a micro-batch, with the forward that is computed again."""
        return self.backward + (self.forward if self.again else 0.0)


@dataclass(frozen=True)
class DataParallel:
    """The same batch by data parallelism on the same devices.

    Attributes:
        compute: seconds of a step's forward and backward, on each device.
        reduce: seconds of the ring all-reduce of the gradients.
        bytes: memory of each device.
    """

    compute: float
    reduce: float
    bytes: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.reduce


@dataclass(frozen=True)
class Measured:
    """Steps of training that have happened.

    Attributes:
        seconds: median, of a step.
        batch: samples of a batch.
        steps: of how many steps that is the median.
    """

    seconds: float
    batch: int
    steps: int


@dataclass(frozen=True)
class Report:
    """What a plan brings; `print` it. Seconds, bytes and samples throughout.

    Attributes:
        model: its name.
        setting: how the plan is carried out.
        stages: what each costs.
        line: a step, simulated.
        data_parallel: what the plan is compared with.
        measured: None where the model was not trained yet.
    """

    model: str
    setting: Setting
    stages: tuple[StageOutlook, ...]
    line: Timeline
    data_parallel: DataParallel
    measured: Measured | None = None

    @property
    def seconds(self) -> float:
        """Predicted, of a step."""
        return self.line.seconds

    @property
    def samples_per_s(self) -> float:
        """Predicted."""
        return _rate(self.setting.batch, self.seconds)

    @property
    def bubble(self) -> float:
        """Predicted share of all devices' time in which they wait."""
        return self._waiting(self.seconds)

    @property
    def measured_samples_per_s(self) -> float | None:
        """Of the steps that have happened."""
        return None if self.measured is None else _rate(self.measured.batch, self.measured.seconds)

    @property
    def measured_bubble(self) -> float | None:
        """Share of the devices' time in measured steps that is not the stages' measured forwards and backwards.

        None where nothing was measured, or other batches than those of the report. The optimizer's update counts as
        waiting. Below 0 where stages are faster within the step than when each operation was tried on its own.
        """
        if self.measured is None or self.measured.batch != self.setting.batch:
            return None
        return self._waiting(self.measured.seconds)

    @property
    def busy(self) -> tuple[float, ...]:
        """By device: seconds of a step in which it computes."""
        micros = self.setting.microbatches
        return tuple(micros * sum(s.forward + s.back for s in mine) for mine in self._by_device())

    @property
    def memory(self) -> tuple[int, ...]:
        """By device: bytes."""
        return tuple(sum(s.bytes for s in mine) for mine in self._by_device())

    @property
    def data_parallel_samples_per_s(self) -> float:
        """What data parallelism on the same devices would bring."""
        return _rate(self.setting.batch, self.data_parallel.seconds)

    @property
    def data_parallel_fits(self) -> bool:
        """Whether each device may take what data parallelism needs."""
        return self.data_parallel.bytes <= self.setting.memory

    @property
    def faster(self) -> str:
        """By prediction: "data parallel", "model parallel", or "about equal"."""
        ratio = self.data_parallel.seconds / self.seconds if self.seconds else 1.0
        if abs(ratio - 1) <= ABOUT:
            return "about equal"
        return "data parallel" if ratio < 1 else "model parallel"

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws the predicted step as a PNG: devices by time, forwards, backwards and waiting.

        Raises:
            ModuleNotFoundError: matplotlib is missing (the extra `plot`).
            OSError: the file cannot be written.
        """
        from tfdist.planner.picture import draw

        draw(self, path)

    def text(self, width: int = 80) -> str:
        """The report in lines of at most `width` characters, as far as that cuts no number."""
        from tfdist.planner.telling import lines

        return "\n".join(line for line, _ in lines(self, width))

    def __str__(self) -> str:
        return self.text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For rich's `print`: as wide as the terminal, headings bold."""
        from rich.text import Text

        from tfdist.planner.telling import lines

        for line, style in lines(self, options.max_width):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")

    def _waiting(self, seconds: float) -> float:
        whole = len(self.setting.devices) * seconds
        return 1 - sum(self.busy) / whole if whole else 0.0

    def _by_device(self) -> list[list[StageOutlook]]:
        return [[s for s in self.stages if s.device == device] for device in range(len(self.setting.devices))]


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds else math.inf
