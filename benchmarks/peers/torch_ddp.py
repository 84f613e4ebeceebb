"""PyTorch's DistributedDataParallel with Gloo: the same models, its defaults (25 MB buckets)."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import models

torch.set_num_threads(1)


def deep() -> nn.Module:
    hidden = [m for _ in range(101) for m in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(models.VOCABULARY, models.WIDTH, bias=False)
        block = nn.TransformerEncoderLayer(models.WIDTH, models.HEADS, 4 * models.WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, models.BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(models.WIDTH, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hot = nn.functional.one_hot(tokens.long(), models.VOCABULARY).float()
        return self.head(self.blocks(self.table(hot)).mean(dim=1))


BUILD = {"deep": deep, "mlp": mlp, "cnn": cnn, "transformer": Transformer}


class TorchDdp:
    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.size > 1:
            meeting = os.environ["BENCHMARK_MEETING"]
            dist.init_process_group("gloo", f"file://{meeting}", rank=self.rank, world_size=self.size)

    def prepare(self, model: str, steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        net = BUILD[model]()
        self.net = nn.parallel.DistributedDataParallel(net) if self.size > 1 else net
        self.optimizer = torch.optim.SGD(self.net.parameters(), models.RATE)
        x, y = models.arrays(model, models.BATCH * self.size * steps)
        if model == "cnn":
            x = x.transpose(0, 3, 1, 2).copy()
        parts = (torch.from_numpy(a[self.rank :: self.size]) for a in (x, y))
        data = torch.utils.data.TensorDataset(*parts)
        # Whole batches by index: the default collates sample by sample, which costs more than these models.
        order = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), models.BATCH, True)
        self.data = torch.utils.data.DataLoader(data, sampler=order, batch_size=None)
        self.train(5)
        return {"torch": str(torch.__version__)}

    def train(self, steps: int | None = None) -> list[float]:
        ends = []
        for number, (x, y) in enumerate(self.data):
            if number == steps:
                break
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(x), y.long()).backward()
            self.optimizer.step()
            ends.append(time.perf_counter())
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    def run(self) -> list[float]:
        return self.train()


def open() -> TorchDdp:
    return TorchDdp()
