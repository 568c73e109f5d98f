"""remat through inductor: every model of the zoo under every budget, and torch's own ways.

    python -m benchmarks.inductor [--resume] [--parts side compile matrix] [--models gpt2 unet]

A cell of the matrix holds if the measured peak keeps the budget, the replayed peak is within 1 % of
it, and every gradient is as near to the float64 one as stock inductor's (twice its error, or 4 ulp
of the norm where it is exact; compared with stock inductor itself, with the same seed, where the
step draws random numbers). Without a budget, everything equals stock inductor's bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import inductor_compile, inductor_peers, rows
from benchmarks.inductor_cells import InductorCell, run_cell, run_stock
from benchmarks.inductor_compile import CompileRow
from benchmarks.inductor_peers import PeerRow
from remat.solvers.units import MIB
from tests.models.zoo import STEPS

# Ascending: a plan of a smaller budget is where the solver starts for the next.
BUDGETS: Final = (0.0, 0.25, 0.5, 0.75, None)
PARTS: Final = ("side", "compile", "matrix")
COMPILED: Final = (("gpt2", "stock"), ("gpt2", "none"), ("gpt2", "0.5"))
Row = InductorCell | PeerRow | CompileRow
_KINDS: Final = {"matrix": InductorCell, "side": PeerRow, "compile": CompileRow}


class _Run:
    """Runs what has not been run yet, and writes down every row as it comes."""

    def __init__(self, path: Path, resume: bool, repetitions: int, time_limit: float) -> None:
        self.path, self.repetitions, self.options = path, repetitions, {"time_limit": time_limit}
        sources = ("benchmarks/inductor_cells.py", "benchmarks/inductor_peers.py")
        self.version = rows.code_version(*rows.REMAT, *sources)
        if not resume:
            path.unlink(missing_ok=True)
        self.done: dict[str, list[Any]] = {part: [] for part in PARTS}
        # A run takes longer than the code stands still: rows of other versions are kept, marked.
        self.older = 0
        for row in _read(path):
            self.older += row.pop("version") != self.version
            part = row.pop("part")
            self.done[part].append(_KINDS[part](**row))

    def has(self, part: str, **fields: Any) -> bool:
        """Whether a row with these fields is there."""
        return any(
            all(getattr(row, key) == value for key, value in fields.items())
            for row in self.done[part]
        )

    def add(self, part: str, row: Row) -> None:
        """Keep and print a row."""
        rows.append(self.path, self.version, {"part": part, **dataclasses.asdict(row)})
        self.done[part].append(row)
        print(_TABLES[part]([row])[-1], flush=True)
        gc.collect()


def _read(path: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_matrix(run: _Run, models: Sequence[str], budgets: Sequence[float | None]) -> None:
    """The cells that are missing."""
    for model in models:
        missing = [b for b in budgets if not run.has("matrix", model=model, budget=b)]
        if not missing:
            continue
        stock = run_stock(STEPS[model]())
        for budget in missing:
            run.add("matrix", run_cell(stock, budget, repetitions=run.repetitions, **run.options))


def run_side_by_side(run: _Run, models: Sequence[str]) -> None:
    """The rows that are missing, the model's fixed budgets last."""
    for model in models:
        alone = [(f"{mib:g} MiB", int(mib * MIB)) for mib in _fixed(model)] + [("least", None)]
        stock = None
        for name, budget in [*((n, 0) for n in inductor_peers.peer_names()), *alone]:
            if run.has("side", model=model, peer=name):
                continue
            stock = stock or inductor_peers.stock_of(model)
            given = (stock, run.repetitions)
            row = (
                inductor_peers.compare_with(model, name, *given, **run.options)
                if budget == 0
                else inductor_peers.run_ours(model, name, budget, *given, **run.options)
            )
            run.add("side", row)


def _fixed(model: str) -> tuple[float, ...]:
    return inductor_peers.BUDGETS_MIB.get(model, ())


def run_compile(run: _Run) -> None:
    """Cold and warm first steps."""
    for model, method in COMPILED:
        if not run.has("compile", model=model, method=method):
            for row in inductor_compile.run_pair(model, method):
                run.add("compile", row)


def matrix_table(cells: Sequence[InductorCell]) -> list[str]:
    """One line a cell, models in the zoo's order and budgets falling."""
    lines = [
        "| model | budget | in MiB | estimated | replayed | measured | error of estimate "
        "| of replay | compiled | planned extra time | time / stock | gradients | holds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    order = list(STEPS)
    key = lambda c: (order.index(c.model), -(2.0 if c.budget is None else c.budget))  # noqa: E731
    return lines + [_cell_line(cell) for cell in sorted(cells, key=key)]


def _cell_line(cell: InductorCell) -> str:
    columns = [
        cell.model,
        "none" if cell.budget is None else f"{cell.budget:g}",
        "" if cell.memory_budget is None else f"{cell.memory_budget / MIB:.2f}",
        *(f"{size / MIB:.2f}" for size in (cell.predicted, cell.replayed, cell.measured)),
        *(f"{100 * (s / cell.measured - 1):+.1f} %" for s in (cell.predicted, cell.replayed)),
        str(cell.compilations),
        f"{100 * cell.extra_time:+.1f} %",
        f"{cell.time_ratio:.2f}",
        _gradients(cell.error),
        "**no**" if cell.problems else "yes",
    ]
    return f"| {' | '.join(columns)} |"


def _gradients(error: float | None) -> str:
    if error is None:
        return "random"
    return f"{error:.2f} × stock's error" if error else "stock's bits"


_TABLES: Final[dict[str, Any]] = {
    "matrix": matrix_table,
    "side": inductor_peers.table,
    "compile": inductor_compile.table,
}
_HEADS: Final = {
    "side": "## Side by side, at each one's own peak\n\nPeaks are above the resident bytes; time "
    "is CPU time over stock inductor's, measured in turns in one process. Peers: torch.compile "
    "with activation_memory_budget, and with every layer checkpointed.",
    "compile": "## The first step\n\nIn wall seconds; a warm process finds the caches of the cold "
    "one.",
    "matrix": "## Models and budgets\n\nPeaks in MiB, resident bytes included. Budget 0.0 is the "
    "least peak that was expected, or the least inductor's code was brought to.",
}


def report(run: _Run) -> str:
    """The whole page, in Markdown."""
    lines = [
        "# Through inductor",
        "",
        f"torch {torch.__version__}, one thread; {os.cpu_count()} processors, load average "
        f"{os.getloadavg()[0]:.1f} at the end: only ratios of times mean something.",
    ]
    if run.older:
        lines += ["", f"{run.older} rows are of earlier versions of the code."]
    for part in PARTS:
        if run.done[part]:
            lines += ["", _HEADS[part], "", *_TABLES[part](run.done[part])]
    cells: list[InductorCell] = run.done["matrix"]
    lines += ["", f"{sum(not c.problems for c in cells)} of {len(cells)} cells hold.", ""]
    return "\n".join([*lines, *(f"- {failure}" for failure in _failures(cells))]) + "\n"


def _failures(cells: Sequence[InductorCell]) -> Iterator[str]:
    for cell in cells:
        for problem in cell.problems[:3]:
            yield f"{cell.model} at {cell.budget}: {problem}"
        if len(cell.problems) > 3:
            yield f"{cell.model} at {cell.budget}: and {len(cell.problems) - 3} more"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts asked for; 1 if a cell does not hold or a peer is faster at its peak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--side", nargs="+", default=["gpt2_12", "llama"])
    parser.add_argument("--budgets", nargs="+", type=float, help="instead of all; none always runs")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--results", type=Path, default=rows.RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one model is compiled for every budget
    path = options.results / "inductor.jsonl"
    run = _Run(path, options.resume, options.repetitions, options.time_limit)
    if "side" in options.parts:
        run_side_by_side(run, options.side)
    if "compile" in options.parts:
        run_compile(run)
    if "matrix" in options.parts:
        budgets = BUDGETS if options.budgets is None else (*sorted(options.budgets), None)
        run_matrix(run, options.models, budgets)
    text = report(run)
    (options.results / "inductor.md").write_text(text, encoding="utf-8")
    print(text)
    bad = any(cell.problems for cell in run.done["matrix"])
    return int(bad or any(inductor_peers.problems(row) for row in run.done["side"]))


if __name__ == "__main__":
    sys.exit(main())
