"""Real models under memory budgets: the peak keeps the budget, and no number changes.

A few cells run always; ``-m matrix`` runs them all. ``benchmarks.matrix`` runs the same cells and
writes them down.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.cells import Baseline, Cell, monotone, refusal, run_baseline, run_cell
from benchmarks.matrix import BUDGETS, code_version, read_cells, table
from benchmarks.rows import append
from tests.models.zoo import STEPS

SMALL = ("bert", "shared_weights")
SMALL_BUDGETS = (0.0, 0.5)
# Counted, not measured: only bytes and bits are looked at.
OPTIONS: dict[str, Any] = {"time_limit": 1.0, "cost": "flops"}


def check_model(model: str, budgets: tuple[float, ...]) -> None:
    baseline = run_baseline(model, **OPTIONS)
    cells = [baseline.cell] + [run_cell(baseline, b, **OPTIONS) for b in budgets]
    assert [(cell.budget, cell.problems) for cell in cells if cell.problems] == []
    assert monotone(cells) == []
    assert min(cell.measured for cell in cells) < baseline.cell.measured
    check_refusal(baseline)


def check_refusal(baseline: Baseline) -> None:
    assert refusal(baseline, **OPTIONS) == []


@pytest.mark.parametrize("model", SMALL)
def test_a_model_keeps_its_budget_and_its_numbers(model: str) -> None:
    check_model(model, SMALL_BUDGETS)


@pytest.mark.matrix
@pytest.mark.parametrize("model", STEPS)
def test_every_model_keeps_every_budget_and_its_numbers(model: str) -> None:
    check_model(model, BUDGETS)


CELL = Cell(
    model="gpt2", budget=0.5, memory_budget=200, resident=50, baseline=300, predicted=199,
    measured=200, seconds=1.0, extra_time=0.1, extra_flops=0.05, gap=0.0, step_seconds=0.2,
    wall=3.0,
)  # fmt: skip


def test_monotone_names_the_budget_that_is_not() -> None:
    least = dataclasses.replace(CELL, budget=0.0, predicted=150, seconds=1.2)
    none = dataclasses.replace(CELL, budget=None, predicted=300, seconds=0.9)
    assert monotone([CELL, none, least]) == []
    slower = dataclasses.replace(none, seconds=1.1)
    assert monotone([slower, CELL]) == ["budget None is predicted slower than 0.5"]
    lower = dataclasses.replace(none, predicted=198)
    assert monotone([lower, CELL]) == ["budget None is predicted to peak below 0.5"]


def test_only_cells_of_the_same_code_are_resumed(tmp_path: Path) -> None:
    rows = tmp_path / "matrix.jsonl"
    append(rows, "old", CELL.to_json())
    append(rows, "new", dataclasses.replace(CELL, budget=0.25).to_json())
    assert list(read_cells(rows, "new")) == [("gpt2", 0.25)]
    assert read_cells(rows, "new")["gpt2", 0.25] == dataclasses.replace(CELL, budget=0.25)
    assert json.loads(rows.read_text().splitlines()[0])["version"] == "old"
    assert code_version() == code_version()


def test_the_table_says_what_does_not_hold() -> None:
    broken = dataclasses.replace(CELL, budget=0.25, problems=["rng differs"])
    text = table([CELL, broken])
    assert "1 of 2 cells hold" in text
    assert "- gpt2 at 0.25: rng differs" in text
