"""What a link saves: the extra time of plans at several bandwidths, on the graphs of a folder.

    python -m benchmarks.offload GRAPHS [NAME ...] [--seconds 6] [--output FILE]

GRAPHS holds problems as ``NAME.json.gz``. Writes ``benchmarks/results/offload_curves.md``. A budget
is a share of what there is to plan: floor + share * (keeping everything - floor), so that it exists
for every graph; and half of the peak of keeping everything, where that is above the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remat.solvers.bounds import floor
from remat.solvers.choose import solve
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution
from remat.solvers.units import MIB

SHARES: Final = (0.7, 0.5, 0.3)
BANDWIDTHS: Final = (0.0, 12e9, 25e9, 50e9)  # bytes a second, each way; 0: no link
LATENCY: Final = 10e-6  # seconds
TARGET: Final = 25e9  # the bandwidth of the last column
HALF: Final = "half the peak"


@dataclass(frozen=True)
class Curve:
    """The solutions of one budget, one for each bandwidth."""

    label: str
    budget: int
    solutions: tuple[Solution, ...]

    def row(self, keep: Solution) -> str:
        """One line of the table; times are what is added to that of keeping everything."""

        def extra(seconds: float) -> float:
            return 100 * (seconds / keep.seconds - 1)

        cells = [
            f"{extra(found.seconds):.2f} ({extra(found.lower_bound):.2f})"
            if found.fits
            else "none found"
            for found in self.solutions
        ]
        by_bandwidth = dict(zip(BANDWIDTHS, self.solutions, strict=True))
        without, linked = by_bandwidth[0.0], by_bandwidth[TARGET]
        less = "–"
        if without.fits and linked.fits and without.seconds > keep.seconds:
            saved = (without.seconds - linked.seconds) / (without.seconds - keep.seconds)
            less = f"{100 * saved:.0f} %"
        share = self.budget / keep.peak
        return f"| {self.label} | {share:.3f} | {' | '.join(cells)} | {less} |"


def offloaded_bytes(problem: Problem, solution: Solution) -> int:
    """Bytes that leave in one step."""
    steps = solution.schedule.steps
    return sum(problem.values[step.index].bytes for step in steps if step.kind == "offload")


def curve(problem: Problem, label: str, budget: int, seconds: float) -> Curve:
    """Solve one budget at every bandwidth; a plan of a slower link starts the next."""
    solutions: list[Solution] = []
    starts: list[Schedule] = []
    for bandwidth in BANDWIDTHS:
        link = Link(bandwidth, bandwidth, LATENCY) if bandwidth else None
        found = solve(problem, memory_budget=budget, time_limit=seconds, link=link, starts=starts)
        starts.append(found.schedule)
        solutions.append(found)
    return Curve(label, budget, tuple(solutions))


def budgets(problem: Problem, keep: Solution) -> Iterator[tuple[str, int]]:
    """(label, bytes)."""
    least = floor(problem)[0]
    for share in SHARES:
        yield (
            f"{share * 100:.0f} % of what is above the floor",
            int(least + share * (keep.peak - least)),
        )
    if keep.peak // 2 > least:
        yield HALF, keep.peak // 2


def rows(path: Path, seconds: float) -> Iterator[str]:
    """The table of one graph, line by line, as the figures come in."""
    problem = Problem.load(path)
    keep = solve(problem, memory_budget=None)
    yield f"\n## {path.name.removesuffix('.json.gz')}\n"
    yield (
        f"{len(problem.ops)} ops; keeping everything takes {keep.seconds * 1e3:.1f} ms and peaks "
        f"at {keep.peak / MIB:.0f} MiB; floor {floor(problem)[0] / MIB:.0f} MiB.\n"
    )
    columns = " | ".join(f"{bandwidth / 1e9:.0f} GB/s" for bandwidth in BANDWIDTHS)
    yield f"| budget | of the peak | {columns} | less at {TARGET / 1e9:.0f} GB/s |"
    yield "|---" * (len(BANDWIDTHS) + 3) + "|"
    for label, budget in budgets(problem, keep):
        found = curve(problem, label, budget, seconds)
        yield found.row(keep)
        left = ", ".join(
            f"{offloaded_bytes(problem, solution) / MIB:.0f}" for solution in found.solutions
        )
        yield f"<!-- {label}: MiB that leave: {left} -->"
        for solution in found.solutions:
            yield from (f"<!-- {failure} -->" for failure in solution.failures)


def report(paths: Sequence[Path], seconds: float) -> Iterator[str]:
    """The whole report."""
    yield "# Offloading: extra time at several bandwidths\n"
    yield (
        f"Per cent of the time of keeping everything that a plan adds, in brackets the lower bound "
        f"of the class (with a link: of the class with offloading). Time limit {seconds:g} s a "
        f"plan, latency {LATENCY * 1e6:.0f} µs a transfer. Last column: how much less extra time "
        "than without a link."
    )
    for path in paths:
        yield from rows(path, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Write the report; print each line as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", type=Path, help="folder of NAME.json.gz")
    parser.add_argument("names", nargs="*", help="which of them; default all")
    parser.add_argument("--seconds", type=float, default=6.0, help="time limit of each solve")
    default = Path(__file__).parent / "results/offload_curves.md"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args(arguments)
    paths = sorted(options.graphs.glob("*.json.gz"))
    chosen = [p for p in paths if not options.names or p.name.split(".")[0] in options.names]
    with options.output.open("w") as output:
        for line in report(chosen, options.seconds):
            print(line, flush=True)
            print(line, file=output, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
