"""Model already uses torch.utils.checkpoint (two passes over shared blocks) under ambient
saved-tensor hooks.

Source: pytorch/pytorch#193193 (open: compiled backward holds several blocks' recompute set,
        2.3-3.5x
        eager peak), #147565 (checkpoint + ambient hooks silently wrong), PR #147561 / #141684
        (memory budget ignores user checkpoint regions), #161889, #120381.
Hard:   user regions must be respected or overridden knowingly, with dropout inside; both
        traversals'
        regions must not be rebuilt at once; save_on_cpu / pack hooks set by the caller must still
        see
        and restore each saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EXPECTED = "equal"


class Blk(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.n, self.u, self.d, self.x = (
            nn.LayerNorm(d),
            nn.Linear(d, 4 * d),
            nn.Linear(4 * d, d),
            nn.Linear(d, d),
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, h: Any, ctx: Any = None) -> Any:
        if ctx is not None:
            h = h + (self.x(h) @ ctx.transpose(1, 2)).softmax(-1) @ ctx
        return h + self.drop(self.d(F.gelu(self.u(self.n(h)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Blk() for _ in range(3))
        self.out = nn.Linear(8, 5)

    def walk(self, h: Any, ctx: Any = None) -> Any:
        for b in self.blocks:
            h = checkpoint(b, h, ctx, use_reentrant=False)
        return h

    def forward(self, x: Any, ctx: Any) -> Any:
        return self.walk(x).mean(1), self.out(self.walk(x, ctx))


def _r(i: Any, *s: Any) -> Any:
    return torch.randn(*s, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return (
        Net().train(),
        (_r(0, 2, 5, 8), _r(1, 2, 3, 8)),
        lambda o: o[0].square().mean() + o[1].sin().sum(),
    )


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(3):
        opt.zero_grad()
        c = _r(30 + i, 2, 3, 8).requires_grad_()
        ctx = (
            torch.autograd.graph.save_on_cpu()
            if i == 1
            else torch.autograd.graph.saved_tensors_hooks(
                lambda t: ("packed", t.detach().clone()), lambda p: p[1]
            )
            if i == 2
            else torch.enable_grad()
        )
        with ctx:
            a, b = run(_r(i, 2, 5, 8), c)
            loss = a.square().mean() + b.sin().sum()
        loss.backward()
        opt.step()
        res[f"loss{i}"], res[f"gc{i}"] = loss.detach(), c.grad
    return res
