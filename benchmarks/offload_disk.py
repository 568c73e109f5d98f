"""Recomputing alone against recomputing and offloading to disk, model by model, in one run.

    python -m benchmarks.offload_disk DIRECTORY [--models gpt2 unet] [--shares 0.75 0.5 0.25]

A share is a place between the least peak without offloading (0) and the peak without remat (1).
Both runs of a row have the same budget in bytes; peaks are measured, steps are timed in turns, and
both are held against the graph without a budget, which runs the same kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import remat
from benchmarks.cells import measure_run
from remat.cost.device import find_device
from remat.cost.link import find_link
from remat.solvers.units import MIB
from tests.models.steps import TrainingStep, differences, run_step, train_once
from tests.models.zoo import STEPS

_REPEATS: Final = 7


@dataclass(frozen=True)
class Side:
    """One way to keep the budget; bytes and seconds."""

    planned: int
    measured: int
    extra_time: float
    offloaded: int
    same_bits: bool
    run: Callable[..., Any]


def one_side(step: TrainingStep, wanted: Any, budget: int, **options: Any) -> Side:
    """Compile, compare with the unrewritten graph, measure the peak."""
    torch._dynamo.reset()
    run = remat.compile(step.model, memory_budget=budget, executor="eager", **options)
    same = not differences(wanted, run_step(run, step))
    measured = measure_run(run, step).peak
    (plan,) = run.plans
    assert isinstance(plan, remat.Plan)
    return Side(plan.peak, measured, plan.extra_time, plan.offloaded_bytes, same, run)


def step_seconds(step: TrainingStep, runs: Sequence[Callable[..., Any]]) -> list[float]:
    """The median wall time of a step of each, run in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(_REPEATS):
        for times, run in zip(taken, runs, strict=True):
            step.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            train_once(run, step)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def rows_of(model: str, directory: str, shares: Sequence[float], time_limit: float) -> list[str]:
    """The lines of one model."""
    step = STEPS[model]()
    torch._dynamo.reset()
    whole = remat.compile(step.model, memory_budget=None, executor="eager")
    wanted = run_step(whole, step)
    limit = {"time_limit": time_limit}
    least = remat.plan(step.model, step.args, memory_budget=0.0, executor="eager", **limit)
    lines = []
    for share in sorted(shares, reverse=True):
        budget = int(least.peak + share * (least.baseline_peak - least.peak))
        alone = one_side(step, wanted, budget, **limit)
        disk = one_side(step, wanted, budget, offload=directory, **limit)
        times = step_seconds(step, (whole, alone.run, disk.run))
        cells = [model, f"{share:g}", f"{budget / MIB:.2f}"]
        for side, seconds in zip((alone, disk), times[1:], strict=True):
            held = side.measured <= budget and side.same_bits
            cells += [
                f"{side.planned / MIB:.2f}",
                f"{side.measured / MIB:.2f}",
                f"{100 * side.extra_time:+.1f} %",
                f"{100 * (seconds / times[0] - 1):+.0f} %",
                "yes" if held else "**no**",
            ]
        cells.append(f"{disk.offloaded / MIB:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


HEAD: Final = (
    "| model | share | budget MiB "
    "| alone: planned MiB | measured | extra time predicted | measured | holds "
    "| disk: planned MiB | measured | extra time predicted | measured | holds | offloaded MiB |\n"
    "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---|---:|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a budget or a bit does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="on the disk that values go to")
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5, 0.25])
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each solve")
    options = parser.parse_args(arguments)
    directory = str(options.directory.resolve())
    link = find_link(directory, find_device("cpu"))
    torch.set_num_threads(1)
    print(
        f"link: {link.offload_bandwidth / 1e6:.0f} MB/s there, {link.reload_bandwidth / 1e6:.0f} "
        f"MB/s back, {1e6 * link.latency:.0f} us each; extra time over keeping everything\n\n{HEAD}"
    )
    lines = []
    for model in options.models:
        lines += rows_of(model, directory, options.shares, options.time_limit)
    return int(any("**no**" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
