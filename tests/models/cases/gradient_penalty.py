"""WGAN-GP: backward through the gradient (create_graph=True).

Source: pytorch/pytorch#91469 (open since 2022), #181581, #183603, PR #92348.
Hard:   AOT graphs hold a first-order backward only. Stock torch.compile raises; a pass that
        replaces backward must do the same loudly, never return a gradient without grad_fn. A plain
        step must work before and after the refused one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

REFUSED = "double_backward=True"


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 1)
        )

    def forward(self, x: Any) -> Any:
        return self.net(x).squeeze(-1)


def _x(i: Any) -> Any:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Critic(), (_x(0).requires_grad_(),), lambda o: o.mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    x = _x(1).requires_grad_()
    out = run(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert g.requires_grad  # a gradient cut off would be silently wrong
    loss = out.mean() + 10 * (g.norm(2, dim=1) - 1).square().mean()
    loss.backward()
    return {"loss": loss.detach(), "g": g.detach()}
