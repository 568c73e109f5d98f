"""BatchNorm with momentum=None: a cumulative average, whose factor is read off a tensor.

Source: pytorch/pytorch#96136 (open); torch/nn/modules/batchnorm.py: 1.0 / float(num_batches).
Hard:   the number of batches becomes a Python number in forward, which breaks the graph; what is
        compiled for one value of it is wrong for the next step's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100))
    return Net().train(), (x,), lambda out: out.square().mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(3):
        opt.zero_grad()
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        loss = run(x).square().mean()
        loss.backward()
        opt.step()
        res[f"loss{i}"] = loss.detach()
    return res
