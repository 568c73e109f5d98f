"""Same network runs several times before one backward (contrastive / siamese / BYOL).

Source: microsoft/DeepSpeed#988 (siamese, gradient computed twice), pytorch/pytorch#22095,
        FlagEmbedding#1155, microsoft/FocalNet#4 (DDP 'marked ready twice'),
        pytorch PR #146878 (fwd called several times without backward: RNG pairing).
Hard:   two live forwards share parameters and mutated BN buffers; each backward must use its own
        dropout masks and its own saved values, in reverse call order. A no_grad target pass with
        the same wrapper sits between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Enc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 4),
        )

    def forward(self, x: Any) -> Any:
        return F.normalize(self.net(x), dim=-1)


def _x(i: Any) -> Any:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Enc().train(), (_x(0),), lambda o: (o @ o.t()).exp().sum().log()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    res = {}
    for i in range(2):
        opt.zero_grad()
        a = run(_x(10 * i))
        with torch.no_grad():
            t = run(_x(10 * i + 1))
        b = run(_x(10 * i + 2))
        logits = a @ b.t() / 0.2
        loss = (
            F.cross_entropy(logits, torch.arange(6)) + (a - t).square().mean() + (b * t).sum().cos()
        )
        loss.backward()
        opt.step()
        res[f"loss{i}"] = loss.detach()
    # and two forwards with two separate backwards, oldest first
    opt.zero_grad()
    a, b = run(_x(30)), run(_x(31))
    a.pow(3).sum().backward()
    b.pow(3).sum().backward()
    return res
