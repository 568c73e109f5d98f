"""What callers put around and inside of a step: backwards of their own, checkpoints, NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from tests.models.beyond import Doubling

# What torch itself says while it traces autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

PLANS = pytest.mark.parametrize("memory_budget", [None, 0.5, 0.0])
OPTIONS: dict[str, Any] = {
    "executor": "eager", "cost": "flops", "time_limit": 0.3, "on_unplanned": "ignore",
}  # fmt: skip


class Noisy(Doubling):
    """Its gradient has noise of its own."""

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


@pytest.mark.parametrize("memory_budget", [1.0, 0.5, 0.0, "200KiB"])
def test_a_checkpoint_around_blocks_runs_the_same_plan_again(memory_budget: float | str) -> None:
    """Forward and its repetition must save the same, whatever is known of the step by then."""

    def gradients(planned: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)]
        runs: list[Any] = list(blocks)
        if planned:
            runs = [remat.compile(b, memory_budget=memory_budget, **OPTIONS) for b in blocks]
        found = []
        for step in range(3):
            x = torch.randn(64, 16).requires_grad_()
            y = x
            for run in runs:
                y = checkpoint(lambda y, r=run: r(torch.sin(y)), y, use_reentrant=False)
                y = checkpoint(lambda y, r=run: r(r(y).sin()), y, use_reentrant=False)
            y.square().sum().backward(retain_graph=True)
            y.sum().backward()
            found.append(x.grad)
            found += [p.grad.clone() for block in blocks for p in block.parameters()]
            assert len(found) == (step + 1) * (1 + 3 * 4)
        return found

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


class Mixed(nn.Module):
    """Mixes its batch by a number of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        share = torch.as_tensor(np.random.rand(1)).float()
        return self.layers(x * share + x.flip(0) * (1 - share))


def test_numpy_inside_a_graph_draws_as_stock_does() -> None:
    def gradient(prepare: Callable[[nn.Module], Any]) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        np.random.seed(0)
        net = Mixed()
        prepare(net)(torch.randn(8, 16)).sum().backward()
        return net.layers[0].weight.grad

    stock = gradient(lambda net: torch.compile(net, backend="aot_eager", dynamic=False))
    for memory_budget in (None, 0.0):
        ours = gradient(lambda net, b=memory_budget: remat.compile(net, memory_budget=b, **OPTIONS))
        assert torch.equal(ours, stock)
    assert not torch.equal(stock, gradient(lambda net: net))
