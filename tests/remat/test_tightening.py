"""Plan, compile, replay, tighten: with a compiler that does nothing and a replay that is told.

The real compiler's part is in ``test_inductor.py`` and ``tests/models/test_inductor_matrix.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import inductor
from remat.executors.inductor import InductorGraph
from remat.passes.torch_private import partition as private
from remat.plan_store import PlanStore
from remat.plans import Plan
from remat.solvers.errors import BudgetTooSmall


class Deep(nn.Module):
    """Eight layers whose activations dominate their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@dataclasses.dataclass
class Watched:
    """What the stand-in compiler saw, and by how many bytes the replay is over the estimate."""

    over: Sequence[int] = (0,)
    keys: list[str] = dataclasses.field(default_factory=list)
    plans: list[Plan] = dataclasses.field(default_factory=list)
    cached: bool = False

    def compile_graph(
        self, graph: Any, inputs: Any, *, partition: Callable[..., Any], key: str, **_: Any
    ) -> InductorGraph:
        self.keys.append(key)
        split: Callable[..., Any] = private.default_partition if self.cached else partition
        if self.cached:

            def split(joint: Any, joint_inputs: Any, **options: Any) -> Any:
                count = options.pop("num_fwd_outputs")
                return private.default_partition(joint, joint_inputs, count, **options)

        run = private.aot_compile(graph, inputs, partition=split)
        return InductorGraph(run, not self.cached, None, None, None)

    def replayed(self, _: Any, made: Any, plan: Plan) -> Plan:
        self.plans.append(plan)
        extra = self.over[min(len(self.plans), len(self.over)) - 1]
        return dataclasses.replace(plan, replayed_peak=plan.predicted + extra)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Watched:
    seen = Watched()
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor.inductor, "compile_graph", seen.compile_graph)
    monkeypatch.setattr(inductor._Compiler, "_replayed", lambda *args: seen.replayed(*args))
    return seen


def step(**options: Any) -> Any:
    torch._dynamo.reset()
    run = remat.compile(Deep(), executor="inductor", time_limit=0.3, cost="flops", **options)
    run(torch.randn(64, 16)).backward()
    return run


def between(share: float) -> int:
    """A budget in bytes between the least peak and the baseline's."""
    made = remat.plan(
        Deep(), (torch.randn(64, 16),), memory_budget=share, executor="inductor", time_limit=0.3
    )
    assert made.memory_budget is not None
    return made.memory_budget


def test_a_peak_over_the_budget_is_planned_for_that_much_less(watched: Watched) -> None:
    budget = between(0.6)
    watched.over = (5000, 0)
    plan = step(memory_budget=budget).plans[0]
    assert len(watched.plans) == 2
    assert watched.plans[1].predicted <= watched.plans[0].predicted
    assert watched.plans[1].solution.memory_budget <= budget - 5000 + (
        budget - watched.plans[0].predicted
    )
    assert plan.memory_budget == budget
    assert plan.peak <= budget
    assert plan.predicted == plan.peak


def test_a_budget_that_stays_out_of_reach_is_refused_with_the_figures(watched: Watched) -> None:
    watched.over = (10_000_000,)
    with pytest.raises(BudgetTooSmall, match="compilations") as caught:
        step(memory_budget=between(0.6))
    assert len(watched.plans) <= 1 + inductor.TIGHTENED
    least = min(plan.predicted for plan in watched.plans) + 10_000_000
    assert caught.value.least_peak == least


def test_an_estimate_that_is_too_high_does_not_refuse(watched: Watched) -> None:
    least = between(0.0)
    watched.over = (-3000,)
    plan = step(memory_budget=least - 2000).plans[0]
    assert plan.peak <= plan.memory_budget == least - 2000
    assert plan.predicted > plan.memory_budget


def test_the_smallest_fraction_is_what_the_code_was_brought_to(watched: Watched) -> None:
    watched.over = (4000,)
    plan = step(memory_budget=0.0).plans[0]
    assert plan.memory_budget == plan.peak == plan.predicted + 4000
    assert any("fraction" in note for note in plan.notes)
    assert len(watched.plans) == 1


def test_a_second_process_solves_nothing(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    first = step(memory_budget=0.4).plans[0]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("solved again")

    monkeypatch.setattr("remat.partitioner.solve", refuse)
    monkeypatch.setattr("remat.partitioner.least_peak", refuse)
    # Inductor's cache lost: partitioned again, by the plan that is stored.
    second = step(memory_budget=0.4).plans[0]
    assert watched.keys[0] == watched.keys[-1]
    assert second.solution.schedule == first.solution.schedule
    assert (second.peak, second.memory_budget) == (first.peak, first.memory_budget)
    # Inductor's cache hit: the partition is not called.
    watched.cached = True
    third = step(memory_budget=0.4).plans[0]
    assert third == first


def test_a_stored_plan_whose_code_is_over_the_budget_is_planned_again(watched: Watched) -> None:
    watched.over = (0, 10_000_000, 0)
    step(memory_budget=0.4)
    plan = step(memory_budget=0.4).plans[0]
    assert len(watched.plans) == 3
    assert plan.memory_budget is not None
    assert plan.peak <= plan.memory_budget


def test_another_budget_is_another_key(watched: Watched) -> None:
    step(memory_budget=0.4)
    step(memory_budget=0.5)
    assert watched.keys[0].split()[0] != watched.keys[-1].split()[0]


def test_a_damaged_store_plans_again(watched: Watched) -> None:
    step(memory_budget=0.4)
    (path,) = PlanStore().folder.iterdir()
    path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match="planned again"):
        plan = step(memory_budget=0.4).plans[0]
    assert plan.memory_budget is not None
    assert PlanStore().load(path.stem) is not None
