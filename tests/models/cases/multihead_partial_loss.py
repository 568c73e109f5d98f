"""Several heads; each step uses only some outputs, sometimes with separate backwards.

Source: pytorch/pytorch#121594 (multi-task + gradient checkpointing), #51743 / #102223
        (autograd.grad and backward(inputs=...) with checkpoint), haidog-yaqub/MeanFlow#4.
Hard:   unused outputs get no tangent (None, not zeros: parameters of the unused head must keep
        .grad None); backward(inputs=[...]) asks for a subset; one forward, two backwards on
        different heads share the trunk; intermediate hidden states are outputs as well, so they
        are alive anyway and must not be counted as savings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self, d: int = 10) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.LayerNorm(d)) for _ in range(3)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, 2)) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        hs = []
        for m in self.trunk:
            x = x + m(x)
            hs.append(x)
        return [h(x) for h in self.heads], hs


def _x(i: Any) -> Any:
    return torch.randn(5, 10, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(), (_x(0),), lambda o: sum(y.square().mean() for y in o[0]) + o[1][1].mean()


def _grads(model: nn.Module) -> dict[str, Tensor]:
    # AOTAutograd fills unused tangents with zeros: a gradient of zeros where the plain model has
    # none. That is torch's way, with or without a plan.
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res = {}
    for i in range(3):  # one head at a time
        model.zero_grad(set_to_none=True)
        ys, hs = run(_x(i))
        ys[i].square().mean().backward()
        res[f"one{i}"] = _grads(model)
    model.zero_grad(set_to_none=True)
    ys, hs = run(_x(7))  # two heads, two backwards on one forward
    ys[0].sum().backward(retain_graph=True)
    (ys[2].sin().sum() + hs[0].square().sum()).backward()
    res["two"] = _grads(model)
    model.zero_grad(set_to_none=True)
    ys, hs = run(_x(8))  # subset of leaves only
    sub = list(model.trunk[1].parameters())
    ys[1].square().sum().backward(inputs=sub)
    res["subset"] = _grads(model)
    model.zero_grad(set_to_none=True)
    ys, hs = run(_x(9))  # only a hidden state, heads unused
    hs[1].square().sum().backward()
    res["hidden"] = _grads(model)
    model.zero_grad(set_to_none=True)
    return res
