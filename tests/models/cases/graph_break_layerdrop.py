"""Layer drop decided in Python, .item() logging and a data-dependent branch: graph breaks.

Source: pytorch/pytorch#97436, #141039 (LoRA graph break per block), #193193 (graph break as a
        workaround); LayerDrop under checkpoint is our own variation of the stochastic-layer reports
        (cybertronai/gradient-checkpointing#35, openai/guided-diffusion#167).
Hard:   a break inside the Python loop makes Dynamo give up the whole outer frame; only the inner
        blocks are compiled, one small graph called many times, so a byte budget for the model has
        to be shared between calls. Python's `random` is read during forward and must not be read
        again in backward; the tensor branch picks another path from step to step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.training and random.random() < 0.4:
                continue
            x = layer(x)
            if index == 1:
                self.log.append(round(x.square().mean().item(), 4))  # breaks
        # The branch depends on data.
        return x * 1.5 if x.mean() > 0 else torch.tanh(x)


def _batch(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net().train(), (_batch(0),), lambda y: y.square().mean()


def steps(model: Any, run: Any) -> dict[str, Any]:
    left: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(6):
        optimizer.zero_grad()
        every_parameter = sum(p.sum() for p in model.parameters()) * 0
        loss = run(_batch(index)).square().mean() + every_parameter
        loss.backward()
        optimizer.step()
        left[f"loss{index}"] = loss.detach()
    left["log"] = list(model.log)
    left["random"] = random.random()
    return left
