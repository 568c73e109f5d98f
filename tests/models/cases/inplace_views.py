"""In-place ops, views and slice writes inside the region.

Source: pytorch/pytorch#113737 (open), #119590 (SAC + in-place silently wrong), #158643,
        functorch PR #565 (partitioner recomputed an in-place op), alxndrTL/mamba.py PR #80
        ('torch.utils.checkpoint does not work because pscan operates in place'), #7617.
Hard:   values overwritten later; a view taken before the write must see it; recompute must not run
        the write twice or on a saved buffer; saving a view must charge its base once; expanded and
        transposed (non-contiguous) saved tensors; output is a view of an intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, 2 * d), nn.Linear(d, d), nn.Linear(d, d)
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        u, v = h.chunk(2, -1)  # two views of one buffer
        h = F.selu(u.contiguous(), inplace=True) * torch.sigmoid(v)
        h.add_(0.1)
        buf = x.new_zeros(x.shape[0], x.shape[1] + 2, x.shape[2])
        buf[:, 1:-1] = h  # slice write
        left = buf[:, :-2]  # view taken before the next write
        buf[:, 0].add_(self.scale)  # must show up in `left`
        y = F.relu_(self.b(left + buf[:, 2:]))
        acc = y.clone()
        for t in range(1, acc.shape[1]):  # in-place scan
            acc[:, t] += 0.5 * acc[:, t - 1]
        acc.masked_fill_(acc > 3, 3.0)
        z = self.c(acc.transpose(1, 2).reshape(acc.shape[0], -1, acc.shape[1]).transpose(1, 2))
        z.clamp_(min=-2).sub_(x.mean(1, keepdim=True).expand_as(z))
        return z.transpose(0, 1), z[:, -1]


def _x(i: Any) -> Any:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(), (_x(0).requires_grad_(),), lambda o: o[0].square().mean() + o[1].sin().sum()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(2):
        opt.zero_grad()
        x = _x(i).requires_grad_()
        z, last = run(x)
        loss = z.square().mean() + last.sin().sum()
        loss.backward()
        opt.step()
        res[f"loss{i}"], res[f"gx{i}"] = loss.detach(), x.grad
        # writing through one output must stay visible through the other, as in eager
        with torch.no_grad():
            z[-1].zero_()
        res[f"alias{i}"] = last.detach().abs().sum()
    return res
