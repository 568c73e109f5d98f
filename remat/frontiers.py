"""The whole curve: how much time each peak costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remat.api import plan
from remat.files import write_whole
from remat.options import Options
from remat.plans import Plan
from remat.report.curve import frontier_curve, knee_of
from remat.solvers.errors import InvalidOption
from remat.solvers.frontier import frontier as solve_frontier
from remat.solvers.schedule import Solution
from remat.solvers.units import format_bytes


@dataclass(frozen=True)
class Point:
    """One plan of the curve.

    Attributes:
        memory_budget, peak: bytes, parameters and inputs included.
        extra_time, extra_flops: over the baseline's; 0.08 is 8 % more.
        least_extra_time: no plan within the budget is faster than this (proven).
        solution: the plan itself.
    """

    memory_budget: int
    peak: int
    extra_time: float
    extra_flops: float
    least_extra_time: float
    solution: Solution


@dataclass(frozen=True)
class Frontier:
    """Peak against time for one training step, from the least peak to no saving.

    Attributes:
        baseline: the plan without a budget: what the executor does unasked.
        points: the smallest budget first; more memory is never slower.
    """

    baseline: Plan
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point | None:
        """Where saving more begins to cost more than it did; None for a curve without a bend.

        See :func:`remat.report.curve.knee_of`.
        """
        place = knee_of([(point.peak, point.extra_time) for point in self.points])
        return None if place is None else self.points[place]

    def plot(self) -> str:
        """The curve in characters: extra time against peak, the knee marked ``K``."""
        return "\n".join(frontier_curve(self._rows(), self.baseline.peak, self._knee_at()))

    def save_svg(self, path: str | Path) -> None:
        """Draw the curve as one self-contained SVG file."""
        from remat.report.svg import frontier_svg

        picture = frontier_svg(self._rows(), self.baseline.peak, knee=self._knee_at())
        write_whole(path, picture)

    def _rows(self) -> list[tuple[int, float, float]]:
        return [(p.peak, p.extra_time, p.least_extra_time) for p in self.points]

    def _knee_at(self) -> int | None:
        return None if self.knee is None else self.points.index(self.knee)

    def __str__(self) -> str:
        lines = [
            f"frontier   {self.baseline.graph_hash[:12]}, {self.baseline.executor} on "
            f"{self.baseline.device}; without remat {format_bytes(self.baseline.peak)}",
            f"{'budget':>11} {'peak':>11} {'extra time':>11} {'extra FLOPs':>12} {'proven':>9}",
        ]
        for p in self.points:
            lines.append(
                f"{format_bytes(p.memory_budget):>11} {format_bytes(p.peak):>11} "
                f"{p.extra_time:>+11.2%} {p.extra_flops:>+12.2%} {p.least_extra_time:>+9.2%}"
            )
        if not self.points:
            lines.append("no plan was found for any budget: a longer time_limit may find some")
        lines.append("proven: no plan within that budget costs less extra time")
        if (knee := self.knee) is not None:
            lines.append(
                f"knee: {format_bytes(knee.peak)} ({knee.peak} bytes) for {knee.extra_time:+.2%} "
                "time"
            )
        return "\n".join(lines)


def frontier(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    points: int = 9,
    **options: Any,
) -> Frontier:
    """Plan a training step for a range of budgets, without running it.

    Args:
        model, args, kwargs, loss: as for :func:`remat.plan`.
        points: how many budgets, evenly from the least peak to that of keeping everything.
        options: see :class:`remat.Options`; ``time_limit`` is for each point.

    Raises:
        InvalidOption: an option is wrong, or there are fewer than two points.
        CaptureError: the step is not one graph.
    """
    checked = Options.make(**options)
    for name in ("memory_budget", "plan", "every_n_layers"):
        if getattr(checked, name) is not None:
            raise InvalidOption(f"a frontier has every budget; leave {name} out, or use remat.plan")
    if points < 2:  # known before anything is captured
        raise InvalidOption(f"points is {points!r}; a frontier has at least 2, its two ends")
    unasked = {**options, "solver": "auto"}  # a named solver is asked even without a budget
    baseline = plan(model, args, kwargs, loss=loss, **unasked)
    solutions = solve_frontier(
        baseline.problem,
        points=points,
        solver=checked.solver,
        time_limit=checked.time_limit * points,
        gap=checked.gap,
        link=baseline.link,
        progress=checked.progress,
    )
    return Frontier(baseline, tuple(_point(baseline, s) for s in solutions if s.fits))


def _point(baseline: Plan, solution: Solution) -> Point:
    old = baseline.baseline_timeline
    budget = solution.memory_budget
    return Point(
        memory_budget=solution.peak if budget is None else budget,
        peak=solution.peak,
        extra_time=_extra(solution.seconds, old.seconds),
        extra_flops=_extra(solution.timeline.flops, old.flops),
        least_extra_time=_extra(min(solution.lower_bound, solution.seconds), old.seconds),
        solution=solution,
    )


def _extra(new: float, old: float) -> float:
    return new / old - 1 if old > 0 else 0.0
