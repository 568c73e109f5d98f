"""``auto``: keep everything if it fits, else the one-cut MILP, tightened until the judge agrees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from remat.solvers.bounds import floor
from remat.solvers.keep import keep_everything
from remat.solvers.milp import CutAnswer, MilpFailure, one_cut
from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.retention import saved_by_default, schedule_from_retention
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

_ROUNDS: Final = 8


@register("auto")
def solve_auto(request: Request) -> Proposal:
    """The best plan that can be found within the budget before the deadline."""
    problem, budget = request.problem, request.memory_budget
    structure = Structure(problem)
    keep = keep_everything(problem, structure)
    if budget is None or simulate(problem, keep).peak <= budget:
        return Proposal(keep, structure.required_seconds)
    if floor(problem, structure)[0] > budget:
        return least_peak_proposal(request)
    return _tighten(request, structure)


def least_peak_proposal(request: Request) -> Proposal:
    """The plan with the smallest peak that can be found before the deadline."""
    problem = request.problem
    structure = Structure(problem)
    best = keep_everything(problem, structure)
    peak = simulate(problem, best).peak
    failures: tuple[str, ...] = ()
    for budget in np.linspace(floor(problem, structure)[0], peak, _ROUNDS, endpoint=False):
        try:
            answer = one_cut(
                problem, int(budget), peak_cut(structure), structure=structure, gap=1e-2
            )
        except MilpFailure as failure:
            return Proposal(best, structure.required_seconds, (*failures, str(failure)))
        if answer.kept is not None:
            plan = schedule_of_cut(structure, peak_cut(structure), answer)
            reached = simulate(problem, plan).peak
            best, peak = (plan, reached) if reached < peak else (best, peak)
        if request.seconds_left == 0:
            break
    return Proposal(best, structure.required_seconds, failures)


def _tighten(request: Request, structure: Structure) -> Proposal:
    problem, budget = request.problem, request.memory_budget
    assert budget is not None
    cut, target, bound = peak_cut(structure), budget, structure.required_seconds
    least: tuple[int, Schedule] | None = None
    for round_ in range(_ROUNDS):
        limit = request.seconds_left if request.max_evaluations is None else float("inf")
        try:
            answer = one_cut(problem, target, cut, structure=structure, time_limit=limit, gap=1e-3)
        except MilpFailure as failure:
            return Proposal(least and least[1], bound, (str(failure),))
        if round_ == 0:
            bound = answer.lower_bound
        if answer.kept is None:
            break
        plan = schedule_of_cut(structure, cut, answer)
        peak = simulate(problem, plan).peak
        least = (peak, plan) if least is None or peak < least[0] else least
        if peak <= budget or request.seconds_left == 0:
            break
        target -= max(peak - budget, budget // 50)
    return Proposal(least and least[1], bound)


def peak_cut(structure: Structure) -> int:
    """The position of the skeleton at which keeping everything peaks."""
    problem = structure.problem
    change = np.zeros(len(structure.order) + 1, dtype=np.int64)
    for v, last in _last_reads(structure):
        change[structure.position[problem.producer[v]]] += problem.values[v].bytes
        change[last + 1] -= problem.values[v].bytes
    extra = np.cumsum(change)[:-1]
    for at, op in enumerate(structure.order):
        extra[at] -= sum(
            problem.values[v].bytes
            for v in structure.reads[op]
            if structure.computed_again[v] and not structure.holds(v, at)
        )
    return int(np.argmax(structure.unavoidable_bytes + extra))


def _last_reads(structure: Structure) -> Iterator[tuple[int, int]]:
    problem = structure.problem
    saved = saved_by_default(problem, structure)
    last: dict[int, int] = {}
    for at, op in enumerate(structure.order):
        for v in structure.reads[op]:
            if v in saved and not problem.values[v].output:
                last[v] = at
    yield from last.items()


def schedule_of_cut(structure: Structure, cut: int, answer: CutAnswer) -> Schedule:
    """The schedule of a one-cut plan: until the cut, what is read there is kept as well.

    A value that is read before the cut but not resident at it is dropped at the cut, not at the end
    of forward: one group for all of backward would compute it again for nothing.
    """
    problem, end = structure.problem, structure.forward_end
    assert answer.kept is not None
    until = {
        v for op in structure.order[end : cut + 1] for v in structure.reads[op]
    } & saved_by_default(problem, structure)  # fmt: skip
    group_of = [int(at > cut) for at in range(end, len(structure.order))]
    return schedule_from_retention(problem, [answer.kept | until, answer.kept], group_of, structure)
