"""Backwards that the caller wrote (``autograd.Function``): what they draw and count is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat

# What torch itself says while it traces autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

PLANS = pytest.mark.parametrize("memory_budget", [None, 0.5, 0.0])
OPTIONS: dict[str, Any] = {
    "executor": "eager", "cost": "flops", "time_limit": 0.3, "on_unplanned": "ignore",
}  # fmt: skip


class Noisy(torch.autograd.Function):
    """Its gradient has noise of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() + 0.01 * torch.rand(x.shape)


class Counting(torch.autograd.Function):
    """It counts how often a gradient came through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(1)
        return gradient * ctx.count, None


class Net(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("count", torch.zeros(1))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.act(self, torch.tanh(layer(x)))
        return x


def trained(
    prepare: Callable[[Net], Any], act: Callable[[nn.Module, Tensor], Tensor]
) -> list[Tensor]:
    """Two steps, of two backwards each; the caller draws in between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(act)
    run, seen = prepare(net), []
    for _ in range(2):
        y = run(torch.randn(8, 16))
        seen += [torch.rand(3), net.count.clone()]
        y.square().mean().backward(retain_graph=True)
        seen += [net.count.clone()]
        y.sum().backward()
        seen += [net.count.clone(), torch.rand(3)]
        seen += [parameter.grad.clone() for parameter in net.parameters()]
    return seen


@PLANS
def test_a_backward_draws_when_it_runs(memory_budget: float | None) -> None:
    def act(_: nn.Module, x: Tensor) -> Tensor:
        return Noisy.apply(x)

    def prepare(net: Net) -> Any:
        return remat.compile(net, memory_budget=memory_budget, **OPTIONS)

    torch.testing.assert_close(trained(prepare, act), trained(lambda n: n, act), rtol=0, atol=0)


@PLANS
def test_a_backward_counts_whenever_it_runs(memory_budget: float | None) -> None:
    def act(net: nn.Module, x: Tensor) -> Tensor:
        return Counting.apply(x, net.count)

    def prepare(net: Net) -> Any:
        return remat.compile(net, memory_budget=memory_budget, **OPTIONS)

    torch.testing.assert_close(trained(prepare, act), trained(lambda n: n, act), rtol=0, atol=0)
