from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import BudgetTooSmall, InvalidOption

WIDTH = 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.drop(self.up(x)).sin()))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def trained(**options: Any) -> tuple[dict[str, Tensor], Any]:
    """Loss and gradients of one step, and the plan; without options those of the plain model."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, WIDTH)
    run = remat.compile(model, executor="eager", time_limit=0.5, **options) if options else model
    torch.manual_seed(1)
    loss = run(x)
    loss.backward()
    left = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
    return left, run.plans[0] if options else None


def planned(**options: Any) -> remat.Plan:
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH)
    return remat.plan(Model(), (x,), executor="eager", time_limit=0.5, **options)


def runs_again(plan: remat.Plan) -> set[str]:
    """Modules of the ops that the plan runs more than once."""
    computes = plan.solution.schedule.computes
    return {plan.problem.ops[i].layer for i in set(computes) if computes.count(i) > 1}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_recompute_is_honoured_without_a_budget_and_changes_no_number() -> None:
    plain, _ = trained()
    found, plan = trained(recompute="layers.*.mlp")
    assert same(plain, found)
    again = runs_again(plan)
    assert {"layers.0.mlp.up", "layers.1.mlp.up", "layers.2.mlp.up"} <= again
    assert all(".mlp" in layer for layer in again)
    dropped = {plan.problem.values[v].name for v in plan.problem.dropped}
    assert dropped
    kept = {row.value for row in plan.decisions.values() if row.action == "keep"}
    assert not dropped & kept
    assert plan.peak < plan.baseline_peak
    assert plan.solution.status == "optimal"
    assert plan.solution.seconds == pytest.approx(plan.solution.lower_bound)


def test_keep_is_honoured_at_the_least_peak() -> None:
    plain, _ = trained()
    free = planned(memory_budget=0.0)
    assert any(".mlp" in layer for layer in runs_again(free))
    found, plan = trained(memory_budget=0.0, keep=("layers.*.mlp",))
    assert same(plain, found)
    assert not any(".mlp" in layer for layer in runs_again(plan))
    assert plan.peak > free.peak


def test_both_together_within_a_budget() -> None:
    options: dict[str, Any] = {"keep": ("layers.0",), "recompute": ("layers.[12].mlp",)}
    plain, _ = trained()
    found, plan = trained(memory_budget=0.2, **options)
    assert same(plain, found)
    assert plan.peak <= plan.memory_budget
    again = runs_again(plan)
    assert "layers.2.mlp.up" in again
    assert not any(layer.startswith("layers.0") for layer in again)


def test_a_budget_that_the_patterns_make_impossible_says_so() -> None:
    least = planned(memory_budget=0.0).least_peak
    assert least is not None
    with pytest.raises(BudgetTooSmall) as caught:
        planned(memory_budget=int(least * 1.02), keep=("layers.*.mlp", "head"))
    text = str(caught.value)
    assert "Without keep and recompute the least peak is" in text
    assert "they are not what costs it" not in text
    lines = {line.split(":")[0].strip(): line for line in text.split("\n") if "  without" in line}
    assert set(lines) == {"without keep='layers.*.mlp'", "without keep='head'"}
    figures = {name: int(line.split("(")[1].split()[0]) for name, line in lines.items()}
    assert figures["without keep='layers.*.mlp'"] < caught.value.least_peak
    assert figures["without keep='head'"] == pytest.approx(caught.value.least_peak, rel=0.05)


def test_patterns_are_innocent_of_a_budget_below_what_anything_takes() -> None:
    with pytest.raises(BudgetTooSmall, match="they are not what costs it"):
        planned(memory_budget=1000, keep="head")


def test_a_pattern_that_means_nothing_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"keep='layer.\*.mlp' matches no module .* 'layers"):
        planned(keep="layer.*.mlp")
    with pytest.raises(InvalidOption, match="lies in both"):
        planned(keep="layers.0", recompute="layers.*.mlp")


def test_a_stored_plan_brings_its_patterns(tmp_path: Path) -> None:
    plan = planned(recompute="layers.*.mlp")
    plan.save(tmp_path / "plan.json")
    stored = remat.Plan.load(tmp_path / "plan.json")
    assert stored.recompute == ("layers.*.mlp",)
    assert stored.problem.key == plan.problem.key
    plain, _ = trained()
    found, replayed = trained(plan=tmp_path / "plan.json")
    assert same(plain, found)
    assert replayed.solution.schedule == plan.solution.schedule
    with pytest.raises(InvalidOption, match="a stored plan brings its own keep= and recompute="):
        trained(plan=tmp_path / "plan.json", keep="head")


@pytest.mark.parametrize("solver", ["ilp", "sqrt", "greedy", "chain", "mincut", "keep"])
def test_every_solver_honours_recompute(solver: str) -> None:
    plan = planned(memory_budget=None, solver=solver, recompute=("layers.*.mlp",))
    assert {"layers.0.mlp.up", "layers.1.mlp.up", "layers.2.mlp.up"} <= runs_again(plan)
