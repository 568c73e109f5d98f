"""Real models through inductor: the true peak keeps the budget, and gradients are as exact as
stock inductor's.

A few cells run always; ``-m matrix`` runs them all. ``benchmarks.inductor`` runs the same cells and
writes them down.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks import inductor, inductor_peers
from benchmarks.inductor_cells import (
    InductorCell,
    exact_outcome,
    run_cell,
    run_stock,
    stock_inductor,
    time_ratios,
)
from benchmarks.inductor_peers import PeerRow
from remat.solvers.units import MIB
from tests.models.steps import TrainingStep, run_step
from tests.models.zoo import STEPS

TIME_LIMIT = 2.0

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


class AppliedThrice(nn.Module):
    """Layers whose weights are used three times: their gradients are sums of three."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.grow = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.shrink(F.gelu(self.grow(self.norm(x))))
        return x.square().mean()


def applied_thrice() -> TrainingStep:
    torch.manual_seed(0)
    return TrainingStep("applied_thrice", AppliedThrice(), (torch.randn(512, 32),))


def check(step: TrainingStep, budgets: tuple[float | None, ...]) -> list[InductorCell]:
    """Run the cells; each holds, and every plan peaks below stock inductor."""
    with torch._dynamo.config.patch(recompile_limit=64):
        stock = run_stock(step)
        cells = [
            run_cell(stock, budget, repetitions=0, time_limit=TIME_LIMIT) for budget in budgets
        ]
    assert [(cell.budget, cell.problems) for cell in cells if cell.problems] == []
    assert [cell.budget for cell in cells if cell.budget and cell.measured >= cell.stock] == []
    return cells


def test_a_small_model_keeps_its_budget_and_its_exactness() -> None:
    least, half, none = check(applied_thrice(), (0.0, 0.5, None))
    assert least.measured <= half.measured < none.measured == none.stock
    assert none.error == 0.0
    # What is summed up for a weight used three times is not held until the third sum.
    assert least.replayed < 1.1 * least.predicted
    assert least.compilations == 1


@pytest.mark.matrix
@pytest.mark.parametrize("model", STEPS)
def test_every_model_keeps_every_budget_and_its_exactness(model: str) -> None:
    check(STEPS[model](), inductor.BUDGETS)


def test_float64_is_float64_inside_a_norm_that_casts_to_float32() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return (self.weight * (wide * wide.square().mean(-1, keepdim=True).rsqrt())).sum()

    torch.manual_seed(0)
    x = torch.randn(16, 8)
    exact = exact_outcome(TrainingStep("norm", Norm(), (x,)))
    assert exact is not None
    wide = x.double()
    wanted = (wide * wide.square().mean(-1, keepdim=True).rsqrt()).sum(0)
    error = (exact["gradient/weight"] - wanted).abs().max()
    assert error < 1e-12


def test_a_step_that_draws_has_no_exact_outcome() -> None:
    class Dropped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x)).sum()

    assert exact_outcome(TrainingStep("draws", Dropped(8, 8), (torch.randn(4, 8),))) is None


CELL = InductorCell(
    model="gpt2", budget=0.5, memory_budget=200 * MIB, resident=50 * MIB, predicted=198 * MIB,
    replayed=200 * MIB, measured=200 * MIB, stock=300 * MIB, compilations=2, planning=1.0,
    compiling=60.0, extra_time=0.1, time_ratio=1.08, error=0.9,
)  # fmt: skip
ROW = PeerRow(
    model="gpt2_12", peer="0.5", peak=100 * MIB, time=1.2, budget=100 * MIB, ours=99 * MIB,
    ours_time=1.1, predicted=98 * MIB, replayed=99 * MIB, compilations=1, note="",
)  # fmt: skip


def test_a_peer_that_is_faster_at_its_peak_is_named() -> None:
    assert inductor_peers.problems(ROW) == []
    slower = dataclasses.replace(ROW, ours_time=1.3)
    assert inductor_peers.problems(slower) == ["slower than 0.5 at its peak"]
    over = dataclasses.replace(ROW, ours=100 * MIB + 1)
    assert inductor_peers.problems(over) == ["1 bytes over the budget"]
    refused = dataclasses.replace(ROW, ours=None, ours_time=None, note="refused")
    assert inductor_peers.problems(refused) == ["refused"]
    assert "| slower than 0.5 at its peak |" in inductor_peers.table([slower])[-1]


def test_the_page_says_what_does_not_hold_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "inductor.jsonl"
    run = inductor._Run(path, resume=False, repetitions=1, time_limit=1.0)
    run.add("matrix", CELL)
    run.add("matrix", dataclasses.replace(CELL, budget=None, error=0.0, problems=["no"]))
    run.add("side", ROW)
    again = inductor._Run(path, resume=True, repetitions=1, time_limit=1.0)
    assert again.done == run.done
    assert again.has("matrix", model="gpt2", budget=0.5)
    assert not again.has("matrix", model="gpt2", budget=0.25)
    text = inductor.report(again)
    assert "1 of 2 cells hold" in text
    assert "- gpt2 at None: no" in text
    assert text.index("| gpt2 | none |") < text.index("| gpt2 | 0.5 |")


def test_times_are_ratios_to_the_first() -> None:
    step = applied_thrice()
    ratios = time_ratios([step.model, step.model], [step, step], 3)
    assert ratios[0] == 1.0
    assert ratios[1] > 0


def test_stock_inductor_compiles_anew_for_each_setting() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    step = applied_thrice()
    for budget in (1.0, 0.5):
        run_step(stock_inductor(step.model, budget), step)
    assert counters["stats"]["unique_graphs"] == 2
