"""A problem in, a schedule out: pure Python and NumPy, no torch.

The names below load on first use: HiGHS and the compiled evaluator cost a second to import, and
whoever only reads a problem needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from remat.solvers.bounds import floor
    from remat.solvers.choose import least_peak, solve
    from remat.solvers.frontier import frontier
    from remat.solvers.problem import Link, Op, Problem, Value
    from remat.solvers.schedule import Decision, Schedule, Solution, Step, Timeline, decisions
    from remat.solvers.simulate import simulate

_HOMES: Final = {
    "floor": "bounds",
    "frontier": "frontier",
    "least_peak": "choose",
    "solve": "choose",
    "Link": "problem",
    "Op": "problem",
    "Problem": "problem",
    "Value": "problem",
    "Decision": "schedule",
    "Schedule": "schedule",
    "Solution": "schedule",
    "Step": "schedule",
    "Timeline": "schedule",
    "decisions": "schedule",
    "simulate": "simulate",
}

__all__ = [
    "Decision",
    "Link",
    "Op",
    "Problem",
    "Schedule",
    "Solution",
    "Step",
    "Timeline",
    "Value",
    "decisions",
    "floor",
    "frontier",
    "least_peak",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
