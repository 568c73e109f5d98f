"""What inductor makes of a plan, where it is easiest to get wrong; a few tiny models, compiled.

The whole grid of cases, loops and random programs under inductor is behind the markers ``matrix``
and ``fuzz``; without code generation, its graphs are tried by ``test_schedules.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.compare import Outcome
from tests.models.loops import WIDTH, Residual, Run, batch, check

pytestmark = [pytest.mark.parametrize("executor", ["inductor"])]


class ReadThenWritten(nn.Module):
    """Backward needs the buffer and the input as they were before forward wrote into them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        h = (self.linear(x) * self.scale.reciprocal() + state.cos()).exp()
        self.scale.add_(1)
        state.mul_(0.5).add_(h.detach().mean(0))
        return (h * self.scale).sin()


@pytest.mark.parametrize("memory_budget", [None, 0.0, 1.0])
def test_a_buffer_that_is_read_and_then_written(executor: str, memory_budget: Any) -> None:
    """Stock inductor computes the read again, after the write."""

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        state = batch(3, WIDTH)
        for step in range(2):
            run(batch(step), state).square().sum().backward()
        outcome["state"] = state

    check(ReadThenWritten, body, executor, memory_budget=memory_budget)


def test_dropout_is_drawn_once(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        y = run(batch(1))
        torch.manual_seed(11)
        y.square().sum().backward()
        outcome["after"] = torch.rand(3)

    check(Residual, body, executor)


class Normed(nn.Module):
    """A batch norm, and outputs that are a view of another, written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.norm(self.linear(x)))
        y = h * 2
        y[:, :2].mul_(3.0)
        return y, y.t()[1:]


def test_batch_norm_and_several_forwards_and_views_and_two_backwards(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        first, second = run(batch(1)), run(batch(2))
        loss = first[0].square().sum() + 2 * first[1].sin().sum()
        loss.backward(retain_graph=True)
        (second[1].square().sum() + second[0].cos().sum()).backward()
        loss.backward()
        outcome["base"] = first[1]._base is first[0]._base

    check(Normed, body, executor)
