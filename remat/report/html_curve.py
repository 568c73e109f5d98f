"""The frontier of a plan that is there already: its problem, solved for a range of budgets.

``remat.frontier`` starts from a model; a stored plan has the problem, which is all a solver needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from remat.report.html_data import Subject
from remat.solvers.choose import Progress
from remat.solvers.frontier import frontier as solve_frontier


class CurvePoint(Protocol):
    """A point of a frontier, as ``remat.frontier`` makes it. Bytes; extra time as a share."""

    @property
    def memory_budget(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def extra_time(self) -> float: ...
    @property
    def least_extra_time(self) -> float: ...


class Curve(Protocol):
    """What ``remat.frontier`` gives: points, the smallest budget first."""

    @property
    def points(self) -> Sequence[CurvePoint]: ...


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """One budget of a plan's curve; see :class:`CurvePoint`."""

    memory_budget: int
    peak: int
    extra_time: float
    least_extra_time: float


@dataclass(frozen=True, slots=True)
class PlanCurve:
    """The curve of a plan's problem; see :class:`Curve`."""

    points: tuple[PlanPoint, ...]


def curve_of(
    subject: Subject, points: int, time_limit: float = 10.0, progress: Progress | None = None
) -> PlanCurve:
    """Solve the problem of a plan for ``points`` budgets, from the least peak to no saving.

    Args:
        time_limit: seconds for each of them.

    Raises:
        InvalidOption: fewer than two points.
    """
    old = subject.baseline_timeline.seconds
    solutions = solve_frontier(
        subject.problem,
        points=points,
        time_limit=time_limit * points,
        link=subject.link,
        progress=progress,
    )
    return PlanCurve(
        tuple(
            PlanPoint(
                memory_budget=s.peak if s.memory_budget is None else s.memory_budget,
                peak=s.peak,
                extra_time=s.seconds / old - 1 if old > 0 else 0.0,
                least_extra_time=min(s.lower_bound, s.seconds) / old - 1 if old > 0 else 0.0,
            )
            for s in solutions
            if s.fits
        )
    )
