"""How good and how fast the solvers are, on the joint graphs of a folder.

    python -m benchmarks.solver GRAPHS [NAME ...] [--seconds 10] [--output FILE]

GRAPHS holds problems as ``NAME.json.gz``. Writes ``benchmarks/results/solver.md``: for each budget
the time over that of keeping everything, found and bound, beside the best figures known from a
longer study with other code, and the yardsticks at their own peaks.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from remat.solvers.choose import least_peak, solve
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Problem
from remat.solvers.schedule import Solution
from remat.solvers.units import MIB

SHARES: Final = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
STEPS: Final = (0.25, 0.1, 0.05)
YARDSTICKS: Final = ("mincut", "every_n_layers", "sqrt", "chain", "greedy")

# Time over keep-everything at shares of its peak, then at least + a * (peak - least), then the
# least peak reached as a share of that peak. Found by minutes of search for each figure.
BEST_KNOWN: Final[dict[str, dict[str, float]]] = {
    "unet": {
        "80 %": 1.0295, "60 %": 1.0632, "50 %": 1.0796, "40 %": 1.1020, "30 %": 1.1449,
        "20 %": 1.398, "a = 0.25": 1.106, "a = 0.1": 1.199, "a = 0.05": 1.274, "least": 0.190,
    },
    "resnet50": {
        "80 %": 1.0219, "60 %": 1.0560, "50 %": 1.0904, "40 %": 1.1277, "30 %": 1.1747,
        "20 %": 1.322, "a = 0.25": 1.135, "a = 0.1": 1.212, "a = 0.05": 1.281, "least": 0.174,
    },
    "gpt2_small": {
        "80 %": 1.0396, "60 %": 1.1462,
        "a = 0.25": 1.113, "a = 0.1": 1.174, "a = 0.05": 1.198, "least": 0.526,
    },
    "bert_base": {
        "80 %": 1.0373, "60 %": 1.0844, "50 %": 1.1162, "40 %": 1.1618, "30 %": 1.2388,
        "a = 0.25": 1.135, "a = 0.1": 1.212, "a = 0.05": 1.242, "least": 0.260,
    },
    "llama_8b": {
        "80 %": 1.0085, "60 %": 1.0207, "50 %": 1.0327,
        "a = 0.25": 1.021, "a = 0.1": 1.032, "a = 0.05": 1.043, "least": 0.454,
    },
    "lstm_bptt": {
        "80 %": 1.0331, "50 %": 1.1142, "30 %": 1.207, "20 %": 1.242,
        "a = 0.25": 1.187, "a = 0.1": 1.233, "a = 0.05": 1.301, "least": 0.133,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """A problem and what the table needs of it: keeping everything, and the least peak reached."""

    name: str
    problem: Problem
    keep: Solution
    least: Solution

    @staticmethod
    def load(path: Path, seconds: float) -> Graph:
        problem = Problem.load(path)
        keep = solve(problem, memory_budget=None)
        least = least_peak(problem, time_limit=seconds)
        return Graph(path.name.removesuffix(".json.gz"), problem, keep, least)

    def budgets(self) -> Iterator[tuple[str, int]]:
        """(label, bytes), those below the floor left out."""
        for share in SHARES:
            if share * self.keep.peak >= self.least.peak_lower_bound:
                yield f"{share * 100:.0f} %", int(share * self.keep.peak)
        span = self.keep.peak - self.least.peak
        for step in STEPS:
            yield f"a = {step:g}", int(self.least.peak + step * span)


def rows(graph: Graph, seconds: float) -> Iterator[str]:
    """The table of one graph, line by line, as the figures come in."""
    known = BEST_KNOWN.get(graph.name, {})
    keep, least = graph.keep, graph.least
    yield f"\n## {graph.name}\n"
    yield (
        f"{len(graph.problem.ops)} ops, {len(graph.problem.values)} values; keeping everything "
        f"peaks at {keep.peak / MIB:.1f} MiB, floor {least.peak_lower_bound / MIB:.1f} MiB, least "
        f"peak reached {least.peak / keep.peak:.4f} of keeping everything @ "
        f"{least.seconds / keep.seconds:.4f} (best known {known.get('least', '–')}).\n"
    )
    yield "| budget | time | bound | gap | best known | against it | peak | status | solve s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for label, budget in graph.budgets():
        found = solve(graph.problem, memory_budget=budget, time_limit=seconds)
        ratio, best = found.seconds / keep.seconds, known.get(label)
        against = "–" if best is None else f"{(ratio / best - 1) * 100:+.2f} %"
        yield (
            f"| {label} | {ratio:.4f} | {found.lower_bound / keep.seconds:.4f} "
            f"| {found.gap * 100:.2f} % | {best or '–'} | {against} "
            f"| {found.peak / keep.peak:.4f} | {found.status} | {found.solve_time:.1f} |"
        )
        for failure in found.failures:
            yield f"<!-- {failure} -->"


def yardsticks(graph: Graph, seconds: float) -> Iterator[str]:
    """Solvers that aim at no budget, and ``auto`` at the peak each of them reaches."""
    keep = graph.keep
    yield "\n| yardstick | peak | time | solve s | auto at that peak |"
    yield "|---|---|---|---|---|"
    for name in YARDSTICKS:
        budget = (
            None if name in ("mincut", "every_n_layers") else (keep.peak + graph.least.peak) // 2
        )
        try:
            found = solve(graph.problem, memory_budget=budget, solver=name, time_limit=seconds)
        except InvalidOption as error:
            yield f"| {name} | {error} | – | – | – |"
            continue
        ours = solve(graph.problem, memory_budget=found.peak, time_limit=seconds)
        yield (
            f"| {name} | {found.peak / MIB:.0f} MiB ({found.peak / keep.peak:.3f}) "
            f"| {found.seconds / keep.seconds:.4f} | {found.solve_time:.2f} "
            f"| {ours.seconds / keep.seconds:.4f} |"
        )


def main(arguments: list[str] | None = None) -> int:
    """Write the report; print each line as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", type=Path, help="folder of NAME.json.gz")
    parser.add_argument("names", nargs="*", help="which of them; default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of each solve")
    parser.add_argument("--skip-yardsticks", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/solver.md")
    options = parser.parse_args(arguments)
    paths = sorted(options.graphs.glob("*.json.gz"))
    chosen = [p for p in paths if not options.names or p.name.split(".")[0] in options.names]
    with options.output.open("w") as report:
        for line in _report(chosen, options.seconds, not options.skip_yardsticks):
            print(line, flush=True)
            print(line, file=report, flush=True)
    return 0


def _report(paths: list[Path], seconds: float, with_yardsticks: bool) -> Iterator[str]:
    yield "# Solvers on joint graphs\n"
    yield f"Time limit {seconds:g} s a budget; times are over keeping everything."
    for path in paths:
        graph = Graph.load(path, seconds)
        yield from rows(graph, seconds)
        if with_yardsticks:
            yield from yardsticks(graph, seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    yield f"\nMost memory the process took: {memory} MiB."


if __name__ == "__main__":
    raise SystemExit(main())
