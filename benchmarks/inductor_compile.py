"""Seconds of a first call through inductor, cold and in a second process; run as a child.

    python -m benchmarks.inductor_compile MODEL stock|none|BUDGET

Prints one line of JSON. The caller sets TORCHINDUCTOR_CACHE_DIR and REMAT_CACHE_DIR.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rows import ROOT


@dataclass(frozen=True)
class CompileRow:
    """What one first step took, in seconds of wall time.

    Attributes:
        method: ``stock``, or remat's budget.
        process: ``cold`` with empty caches, ``warm`` in a second process beside the same caches.
        seconds: the first forward and backward.
        planning: what of that was spent in planning.
        partitions, compilations: how often a graph was planned, and went through inductor.
    """

    model: str
    method: str
    process: str
    seconds: float
    planning: float
    partitions: int
    compilations: int


def first_step(model: str, method: str) -> dict[str, Any]:
    """Run the first step of ``model`` and say what it took."""
    import remat
    from benchmarks.inductor_cells import stock_inductor, watched
    from benchmarks.inductor_peers import MODELS
    from tests.models.steps import train_once
    from tests.models.zoo import STEPS

    step = (MODELS | STEPS)[model]()
    with watched(stored_plans=True) as seen:
        if method == "stock":
            run: Any = stock_inductor(step.model)
        else:
            budget = None if method == "none" else float(method)
            run = remat.compile(step.model, memory_budget=budget, executor="inductor")
        begin = time.perf_counter()
        train_once(run, step)
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds, "planning": seen.planning, "partitions": seen.partitions,
        "compilations": seen.compilations,
    }  # fmt: skip


def run_pair(model: str, method: str) -> list[CompileRow]:
    """Two processes one after the other, with caches of their own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch", "REMAT_CACHE_DIR": f"{folder}/remat"}
        for process in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.inductor_compile", model, method]
            ended = subprocess.run(
                command, env={**os.environ, **own}, cwd=ROOT, capture_output=True, text=True
            )
            if ended.returncode:
                raise RuntimeError(f"{command} failed:\n{ended.stderr[-2000:]}")
            said = json.loads(ended.stdout.splitlines()[-1])
            rows.append(CompileRow(model, method, process, **said))
    return rows


def table(rows: list[CompileRow]) -> list[str]:
    """Markdown, one line a row."""
    lines = [
        "| model | method | process | first step s | planning s | planned | compiled |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        _, _, _, *figures = dataclasses.astuple(row)
        shown = [f"{f:.1f}" if isinstance(f, float) else str(f) for f in figures]
        lines.append(f"| {row.model} | {row.method} | {row.process} | {' | '.join(shown)} |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(first_step(*sys.argv[1:3])))
