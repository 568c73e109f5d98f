"""Progressive unfreezing: requires_grad changes while the compiled model lives on.

Source: pytorch/pytorch#139476 (open, high priority: dynamo reuses the stale frame),
        dingo-gw/dingo#407, chiahao3/ptyrad#13.
Hard:   a graph planned while the backbone was frozen has no gradient for it. Reusing the plan
        after p.requires_grad_(True) leaves .grad None with no error. The plan (and its byte
        estimate) must be redone; freezing again must give the cheap plan back and .grad None.
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
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))


def _x() -> Any:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(3))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(), (_x(),), lambda o: o.square().mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res = {}
    stages = [(False, True), (True, True), (True, False), (False, True), (True, True)]
    for n, (bb, hd) in enumerate(stages):
        model.backbone.requires_grad_(bb)
        model.head.requires_grad_(hd)
        model.zero_grad(set_to_none=True)
        loss = run(_x()).square().mean()
        loss.backward()
        res[f"loss{n}"] = loss.detach()
        for k, p in model.named_parameters():
            res[f"stage{n}.{k}"] = None if p.grad is None else p.grad.clone()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return res
