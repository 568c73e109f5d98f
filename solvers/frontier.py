"""The whole curve of peak against seconds, monotone: more memory is never slower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from remat.solvers.choose import Progress, least_peak, solve
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Link, Problem
from remat.solvers.registry import PROVEN
from remat.solvers.schedule import Schedule, Solution


def frontier(
    problem: Problem,
    budgets: Sequence[int] | None = None,
    *,
    points: int = 9,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.0,
    seed: int = 0,
    max_evaluations: int | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
) -> list[Solution]:
    """A solution for each budget, the smallest budget first.

    A plan of a smaller budget starts the search of the next, and replaces its answer where it is
    faster, so seconds never grow with the budget; a bound of a larger budget holds for the smaller.

    Args:
        budgets: bytes; default ``points`` of them, evenly from the least peak that a plan is found
            for to the peak of keeping everything.
        link: where values can be offloaded to.
        time_limit: seconds for all of them together; ``max_evaluations``: for each.

    Raises:
        InvalidOption: fewer than two ``points``.
    """
    if budgets is None and points < 2:
        raise InvalidOption(f"points is {points!r}; a frontier has at least 2, its two ends")
    began = time.monotonic()
    starts: list[Schedule] = []
    if budgets is None:
        share = time_limit / (points + 1)
        least = least_peak(
            problem, time_limit=share, seed=seed, max_evaluations=max_evaluations, link=link
        )
        keep = solve(problem, memory_budget=None)
        starts.append(least.schedule)
        span = keep.peak - least.peak
        budgets = [least.peak + span * k // (points - 1) for k in range(points)]
    solutions: list[Solution] = []
    ordered = sorted(set(budgets))
    for k, budget in enumerate(ordered):
        left = max(0.0, time_limit - (time.monotonic() - began))
        solution = solve(
            problem,
            memory_budget=budget,
            solver=solver,
            time_limit=left / (len(ordered) - k),
            gap=gap,
            seed=seed,
            max_evaluations=max_evaluations,
            link=link,
            starts=starts,
            progress=progress,
        )
        starts.append(solution.schedule)
        solutions.append(solution)
    return _share_bounds(solutions)


def _share_bounds(solutions: list[Solution]) -> list[Solution]:
    """Raise each bound to that of the next larger budget: less memory is not faster.

    What is proven of the least peak for one budget holds for all.
    """
    bound, shared = 0.0, list[Solution]()
    least = max(solutions, key=lambda solution: solution.peak_lower_bound, default=None)
    for solution in reversed(solutions):
        if least is not None and least.peak_lower_bound > solution.peak_lower_bound:
            solution = _with_peak_bound(solution, least)
        if solution.fits:
            bound = max(bound, min(solution.lower_bound, solution.seconds))
            proven = solution.seconds <= bound * (1 + PROVEN)
            solution = replace(
                solution, lower_bound=bound, status="optimal" if proven else solution.status
            )
        shared.append(solution)
    return shared[::-1]


def _with_peak_bound(solution: Solution, least: Solution) -> Solution:
    """``solution`` with the bound on the peak of ``least``, which is higher."""
    under = solution.memory_budget is not None and solution.memory_budget < least.peak_lower_bound
    return replace(
        solution,
        peak_lower_bound=least.peak_lower_bound,
        floor_op=least.floor_op,
        status="infeasible" if under and not solution.fits else solution.status,
    )
