"""What a plan for inductor keeps: decisions, and modules in ``keep``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

OPTIONS: dict[str, Any] = {"executor": "inductor", "cost": "roofline", "time_limit": 0.5}


class Routed(nn.Module):
    """Every layer picks the largest of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            chosen = (y * 3).topk(8, dim=-1)[1]
            x = x + y.sin() * y.gather(-1, chosen).sum(-1, keepdim=True)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def times(plan: Any, target: str) -> list[int]:
    ops = plan.problem.ops
    wanted = [index for index, op in enumerate(ops) if target in op.target]
    return [plan.solution.schedule.computes.count(index) for index in wanted]


def test_decisions_are_made_once() -> None:
    net, x = Routed(), torch.randn(256, 64)
    plan = remat.plan(net, (x,), memory_budget=0.0, **OPTIONS)
    assert times(plan, "topk") == [1] * 4
    assert any("topk" in note and "decides" in note for note in plan.notes)
    eager = remat.plan(net, (x,), memory_budget=0.0, **{**OPTIONS, "executor": "eager"})
    assert len(times(eager, "topk")) == 4
    assert not any("decides" in note for note in eager.notes)  # the same kernel decides the same


@pytest.mark.parametrize("keep", [(), ("blocks.*.act",)])
def test_what_is_kept_is_stored_and_not_computed_in_its_readers(keep: tuple[str, ...]) -> None:
    net, x = Stack(), torch.randn(256, 64)
    plan = remat.plan(net, (x,), memory_budget=None, keep=keep, **OPTIONS)
    inside = [op for op in plan.problem.ops if op.layer.endswith(".act") and op.phase == "forward"]
    stored = [op.name for op in inside if op.writes]
    assert (len(stored) > 3) == bool(keep)
    assert all(op.rerunnable != bool(keep) for op in inside)
