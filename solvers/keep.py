"""Keep everything: no op runs twice. The fastest plan there is, and the largest."""

from __future__ import annotations

from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.retention import saved_by_default, schedule_from_retention
from remat.solvers.schedule import Schedule
from remat.solvers.structure import Structure


def keep_everything(problem: Problem, structure: Structure | None = None) -> Schedule:
    """Every forward op once, every demanded deferred op once, every backward op once."""
    structure = structure or Structure(problem)
    kept = saved_by_default(problem, structure)
    return schedule_from_retention(problem, [kept], structure=structure)


@register("keep")
def solve_keep(request: Request) -> Proposal:
    """The plan that keeps everything, whatever the budget."""
    structure = Structure(request.problem)
    return Proposal(
        keep_everything(request.problem, structure), lower_bound=structure.required_seconds
    )
