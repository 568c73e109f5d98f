"""A buffer is read, used, then updated in place; backward needs the OLD value.

Source: pytorch/pytorch PR #197039 (open: min-cut recompute defers the read past the mutation,
        silently wrong gradients), torchtitan#1182/#1226 and #1935 (MoE buffers updated in
        forward break AC), Automodel#3247.
Hard:   recomputing anything downstream of the read uses the post-update contents. Covers an
        EMA amax scale (delayed fp8 scaling), a VQ codebook with EMA update and straight-through
        gradient, and an input tensor that the forward mutates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self, d: int = 8, k: int = 6) -> None:
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 3)
        self.register_buffer("amax", torch.ones(d))
        self.register_buffer("code", torch.randn(k, d))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Any, ema_state: Any) -> Any:
        h = torch.tanh(self.inp(x))
        s = (h * self.amax.reciprocal()).sin()  # reads the old scale
        self.amax.mul_(0.5).add_(h.detach().abs().amax(0), alpha=0.5)
        z = self.mid(s * ema_state.cos())  # reads the caller's tensor
        ema_state.lerp_(z.detach().mean(0), 0.3)  # ... and then mutates it
        d2 = torch.cdist(z, self.code).square()
        idx = d2.argmin(1)
        q = self.code[idx]  # reads the old codebook
        commit = (z - q).square().mean()
        onehot = F.one_hot(idx, self.code.shape[0]).to(z)
        new = onehot.t() @ z.detach() / (onehot.sum(0, keepdim=True).t() + 1e-3)
        self.code.lerp_(new, 0.2)
        self.count.add_(1)
        y = self.out(z + (q - z).detach()) * (self.amax.mean() + 1)  # reads the NEW scale
        return y, commit


def _x(i: Any) -> Any:
    return torch.randn(10, 8, generator=torch.Generator().manual_seed(50 + i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net().train(), (_x(0), torch.zeros(8)), lambda o: o[0].square().mean() + o[1]


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    state, res = torch.full((8,), 0.25), {}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        opt.zero_grad()
        y, commit = run(_x(i), state)
        loss = y.square().mean() + commit
        loss.backward()
        opt.step()
        res[f"loss{i}"] = loss.detach()
    res["state"] = state
    return res
