"""One name, one algorithm: a new solver is one file with one function under ``@register``."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule

PROVEN: Final = 1e-9
"""Relative distance of a plan's seconds from the bound at which it counts as optimal."""


@dataclass(frozen=True)
class Request:
    """What every solver is asked.

    Attributes:
        memory_budget: bytes the peak may reach; None asks for the fastest plan whatever its peak.
        deadline: ``time.monotonic()`` at which the solver should be back.
        gap: stop as soon as (seconds - lower bound) / seconds is at most this.
        seed, max_evaluations: the same seed and the same number of evaluations give the same plan;
            with ``max_evaluations`` the clock is ignored.
        every_n_layers: for the solver of that name.
        starts: known plans to begin with, whatever they peak at.
        progress: called with (seconds of the best plan or None, lower bound) as they improve.
    """

    problem: Problem
    memory_budget: int | None
    deadline: float = float("inf")
    gap: float = 0.0
    seed: int = 0
    max_evaluations: int | None = None
    every_n_layers: int = 1
    link: Link | None = None
    starts: tuple[Schedule, ...] = ()
    progress: Callable[[float | None, float], None] | None = field(default=None, compare=False)

    @property
    def seconds_left(self) -> float:
        """Until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a solver answers. The judge has the last word on its peak and seconds.

    Attributes:
        schedule: None if it found nothing.
        lower_bound: seconds nothing within the budget can beat, as far as this solver proved.
        infeasible: it is proven that no schedule of the class fits the budget.
        failures: what went wrong on the way.
    """

    schedule: Schedule | None
    lower_bound: float = 0.0
    failures: tuple[str, ...] = ()
    infeasible: bool = False


Solver = Callable[[Request], Proposal]
SOLVERS: Final[dict[str, Solver]] = {}


def register(name: str) -> Callable[[Solver], Solver]:
    """Make a solver known under ``name``."""

    def add(solver: Solver) -> Solver:
        SOLVERS[name] = solver
        return solver

    return add


def find(name: str) -> Solver:
    """The solver of that name.

    Raises:
        InvalidOption: nobody is called that; suggests the nearest.
    """
    if name in SOLVERS:
        return SOLVERS[name]
    near = difflib.get_close_matches(str(name), SOLVERS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidOption(f"unknown solver {name!r}{hint} (known: {', '.join(sorted(SOLVERS))})")
