"""Every model of the zoo under every budget, cell by cell; a run that was cut off can go on.

    python -m benchmarks.matrix [--resume] [--models gpt2 unet] [--budgets 0.5 0.0]

A cell holds if the measured peak keeps the budget (no tolerance), the prediction is within 1 % of
it, and losses, gradients, buffers and the random state equal the unrewritten graph's bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import rows
from benchmarks.cells import Baseline, Cell, monotone, refusal, run_baseline, run_cell
from remat.solvers.units import MIB, format_seconds
from tests.models.zoo import STEPS

# Ascending: a plan of a smaller budget is where the solver starts for the next.
BUDGETS: Final = (0.0, 0.25, 0.5, 0.75)


def code_version() -> str:
    """A hash of everything a cell depends on."""
    return rows.code_version(*rows.REMAT, "benchmarks/cells.py")


def read_cells(path: Path, version: str) -> dict[tuple[str, float | None], Cell]:
    """The cells of ``path`` that this version of the code made."""
    cells = [Cell(**row) for row in rows.read(path, [version])]
    return {(cell.model, cell.budget): cell for cell in cells}


def run_model(
    model: str, budgets: Iterable[float], done: dict[tuple[str, float | None], Cell], **options: Any
) -> Iterable[Cell]:
    """The cells of one model that are not done yet, the one without a budget first."""
    missing = [budget for budget in budgets if (model, budget) not in done]
    if not missing and (model, None) in done:
        return
    # The outcome that the others are compared with is needed even where its cell is done.
    baseline: Baseline = run_baseline(model, **options)
    if (model, None) not in done:
        baseline.cell.problems.extend(refusal(baseline, **options))
        yield baseline.cell
    for budget in missing:
        yield run_cell(baseline, budget, **options)
        gc.collect()


def table(cells: Sequence[Cell]) -> str:
    """Markdown: one line a cell, then what does not hold."""
    lines = [
        "# Models and budgets",
        "",
        "Budget: 1.0 is the peak without remat, 0.0 the least peak a plan was found for. Peaks "
        "include what is resident. `extra` is the predicted time and the FLOPs over the "
        "baseline's.",
        "",
        "| model | budget | in MiB | predicted MiB | measured MiB | extra time | extra FLOPs "
        "| gap | holds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [_line(cell) for cell in cells]
    failures = _failures(cells)
    held = sum(not cell.problems for cell in cells)
    lines += ["", f"{held} of {len(cells)} cells hold; torch {torch.__version__}.", ""]
    return "\n".join([*lines, *(f"- {failure}" for failure in failures)]) + "\n"


def _line(cell: Cell) -> str:
    budget = "none" if cell.budget is None else f"{cell.budget:g}"
    inside = "" if cell.memory_budget is None else f"{cell.memory_budget / MIB:.2f}"
    return (
        f"| {cell.model} | {budget} | {inside} | {cell.predicted / MIB:.2f} "
        f"| {cell.measured / MIB:.2f} | {100 * cell.extra_time:+.1f} % "
        f"| {100 * cell.extra_flops:+.1f} % | {100 * cell.gap:.1f} % "
        f"| {'**no**' if cell.problems else 'yes'} |"
    )


def _failures(cells: Sequence[Cell]) -> list[str]:
    failures = [
        f"{cell.model} at {cell.budget}: {problem}" for cell in cells for problem in cell.problems
    ]
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        failures += [f"{model}: {problem}" for problem in monotone(own)]
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; 1 if a cell does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve")
    parser.add_argument("--resume", action="store_true", help="skip what this code has done")
    parser.add_argument("--results", type=Path, default=rows.RESULTS)
    options = parser.parse_args(arguments)
    version, path = code_version(), options.results / "matrix.jsonl"
    done = read_cells(path, version) if options.resume else {}
    if not options.resume:
        path.unlink(missing_ok=True)
    for model in options.models:
        for cell in run_model(model, options.budgets, done, time_limit=options.time_limit):
            done[cell.model, cell.budget] = cell
            rows.append(path, version, cell.to_json())
            print(_line(cell), format_seconds(cell.wall), *cell.problems, flush=True)
    cells = [done[key] for key in _in_order(done)]
    text = table(cells)
    (options.results / "matrix.md").write_text(text, encoding="utf-8")
    print(text)
    return int(bool(_failures(cells)))


def _in_order(done: Iterable[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    models = list(STEPS)
    return sorted(
        done, key=lambda key: (models.index(key[0]), -(2.0 if key[1] is None else key[1]))
    )


if __name__ == "__main__":
    sys.exit(main())
