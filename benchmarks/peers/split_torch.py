"""The same layers under torch.distributed.pipelining: two ranks over Gloo, or one process without it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

torch.set_num_threads(1)
RATE = 0.01
SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}


class SplitTorch:
    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._steps: dict[str, Any] = {}
        if self.size > 1:
            meeting = f"file://{os.environ['BENCHMARK_MEETING']}"
            dist.init_process_group("gloo", meeting, rank=self.rank, world_size=self.size)

    def prepare(self, name: str, widths: Sequence[int], how: dict[str, Any], batch: int) -> None:
        torch.manual_seed(0)
        layers = [m for a, b in zip(widths, widths[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
        if self.size == 1:
            model = nn.Sequential(*layers)
            step = self._alone(model)
        else:
            cut = 2 * how["balance"][0]  # a layer and its function
            model = nn.Sequential(*(layers[:cut] if self.rank == 0 else layers[cut:]))
            stage = pipelining.PipelineStage(model, self.rank, self.size, torch.device("cpu"))
            ran = SCHEDULES[how["schedule"]](stage, how["microbatches"], loss_fn=nn.functional.mse_loss)
            step = self._piped(model, ran)
        self._steps[name] = step
        self.run(name, widths, batch, 3)

    def _alone(self, model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), RATE)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        return step

    def _piped(self, model: nn.Module, schedule: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), RATE)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            if self.rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()

        return step

    def run(self, name: str, widths: Sequence[int], batch: int, steps: int) -> dict[str, Any]:
        """As `split_keras.SplitKeras.run`."""
        random = torch.Generator().manual_seed(0)
        x, y = (torch.rand((batch, width), generator=random) for width in (widths[0], widths[-1]))
        ends, before = [], os.times()
        for _ in range(steps + 1):
            self._steps[name](x, y)
            ends.append(time.perf_counter())
        after = os.times()
        used = (after.user + after.system - before.user - before.system) / (steps + 1)
        return {"seconds": [b - a for a, b in zip(ends, ends[1:], strict=False)], "processor": [used]}


def open() -> SplitTorch:
    return SplitTorch()
