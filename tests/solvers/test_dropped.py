"""Values that may not be kept: every solver drops them before backward; no bound is too high."""

from __future__ import annotations

from dataclasses import replace

import brute
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.choose import least_peak, solve
from remat.solvers.errors import InvalidProblem, InvalidSchedule
from remat.solvers.keep import keep_everything
from remat.solvers.manycut import many_cuts
from remat.solvers.onecut import one_cut
from remat.solvers.problem import Problem
from remat.solvers.registry import SOLVERS
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Searcher
from remat.solvers.segments import save_all
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

TOLERANCE = 1e-6
NEVER = float("inf")


@st.composite
def dropping(draw: st.DrawFn, **sizes: int) -> Problem:
    """A problem with values that may not be kept; mostly all that can be."""
    problem = draw(problems(drops=False, **sizes))
    able = [
        v
        for index in problem.forward
        if problem.ops[index].rerunnable
        for v in problem.ops[index].writes
        if problem.values[v].bytes and not problem.values[v].output
    ]
    chosen = {v for v in able if draw(st.sampled_from((True, True, False)))}
    assume(chosen)
    return drop(problem, chosen)


def drop(problem: Problem, chosen: set[int]) -> Problem:
    values = tuple(
        replace(value, keepable=False) if v in chosen else value
        for v, value in enumerate(problem.values)
    )
    return replace(problem, values=values)


def held_over(problem: Problem, schedule: Schedule) -> set[int]:
    """The values alive when backward starts."""
    alive: set[int] = set()
    for step in schedule.steps[: schedule.boundary(problem)]:
        if step.kind == "compute":
            alive.update(problem.ops[step.index].writes)
        else:
            alive.discard(step.index)
    return alive


SMALL = dropping(max_forward=5, max_deferred=1, max_backward=3)
BIG = dropping(max_forward=9, max_deferred=2, max_backward=7)


def test_the_judge_refuses_a_schedule_that_keeps_what_may_not_be_kept() -> None:
    free = chain([4] * 4, [1.0] * 3)
    keep = keep_everything(free)
    problem = drop(free, {1})
    with pytest.raises(InvalidSchedule, match="'x1' is there when backward starts, but may not"):
        simulate(problem, keep)
    assert simulate(problem.unrestricted, keep).seconds == free.base_seconds


@settings(max_examples=100)
@given(SMALL)
def test_without_a_budget_keeping_all_else_is_the_fastest(problem: Problem) -> None:
    keep = keep_everything(problem)
    optimum = brute.least_seconds(problem, None)
    assert optimum is not None
    assert simulate(problem, keep).seconds == optimum[0] == Structure(problem).required_seconds
    assert not held_over(problem, keep) & set(problem.dropped)
    simulate(problem, save_all(problem).schedule)


@settings(max_examples=100)
@given(SMALL, st.floats(0, 1), st.booleans())
def test_cuts_are_never_above_the_optimum(problem: Problem, share: float, relaxed: bool) -> None:
    structure = Structure(problem)
    least, _ = brute.least_peak(problem)
    budget = least + int(share * (simulate(problem, keep_everything(problem)).peak - least))
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    assume(structure.order)
    for cut in range(len(structure.order)):
        answer = one_cut(structure, budget, cut, relaxed=relaxed)
        assert answer.lower_bound <= optimum[0] + TOLERANCE * max(1.0, optimum[0])
    start = structure.forward_end
    assume(start < len(structure.order))
    every = many_cuts(structure, budget, range(start, len(structure.order)), relaxed=relaxed)
    assert every is not None
    assert every.lower_bound <= optimum[0] + TOLERANCE * max(1.0, optimum[0])
    if every.plan is not None:
        simulate(problem, every.plan)


@settings(max_examples=40)
@given(SMALL, st.floats(0, 1), st.sampled_from(("auto", "ilp")))
def test_the_exact_solvers_find_the_optimum(problem: Problem, share: float, solver: str) -> None:
    least, _ = brute.least_peak(problem)
    keep = simulate(problem, keep_everything(problem)).peak
    budget = least + int(share * max(0, keep - least))
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    found = solve(problem, memory_budget=budget, solver=solver, max_evaluations=3000)
    assert not held_over(problem, found.schedule) & set(problem.dropped)
    assert found.lower_bound <= optimum[0] + TOLERANCE
    if found.status == "optimal":
        assert found.seconds == pytest.approx(optimum[0])


@settings(max_examples=40)
@given(BIG, st.integers(0, 3))
def test_the_search_never_leaves_what_is_allowed(problem: Problem, seed: int) -> None:
    searcher = Searcher(Structure(problem), seed)
    keep = searcher.found(keep_everything(problem))
    assert keep is not None
    for plan in searcher.seeds:
        simulate(problem, searcher.schedule(plan))
    least = searcher.lower([*searcher.seeds, keep], 0, Effort(NEVER, 500))
    assert least is not None
    budget = (least.peak + keep.peak) // 2
    found = searcher.improve([least], max(budget, least.peak), Effort(NEVER, 800))
    for plan in (least, found):
        timeline = simulate(problem, searcher.schedule(plan))
        assert (timeline.peak, timeline.seconds) == (plan.peak, plan.seconds)


@settings(max_examples=30)
@given(BIG, st.floats(0, 1), st.sampled_from(sorted(SOLVERS)))
def test_every_solver_drops_it(problem: Problem, share: float, solver: str) -> None:
    assume(solver != "every_n_layers")
    free = keep_everything(problem.unrestricted)
    budget = int(share * simulate(problem.unrestricted, free).peak)
    found = solve(problem, memory_budget=budget, solver=solver, max_evaluations=200, starts=(free,))
    assert not held_over(problem, found.schedule) & set(problem.dropped)
    mine = [failure for failure in found.failures if "is there when backward starts" in failure]
    assert all(failure.startswith("start:") for failure in mine)


def test_the_least_peak_of_a_chain_whose_first_half_may_not_be_kept() -> None:
    problem = drop(chain([8] * 9, [1.0] * 8), {1, 2, 3, 4})
    found = least_peak(problem, max_evaluations=5000)
    assert not held_over(problem, found.schedule) & {1, 2, 3, 4}
    assert found.seconds >= Structure(problem).required_seconds > problem.base_seconds


def test_problems_without_such_values_have_the_keys_they_had() -> None:
    problem = chain([4] * 4, [1.0] * 3)
    assert "keepable" not in problem.to_json()["values"][0]
    dropped = drop(problem, {1})
    assert dropped.to_json()["values"][1]["keepable"] is False
    assert Problem.from_json(dropped.to_json()) == dropped
    assert dropped.unrestricted.key == problem.key
    assert problem.unrestricted is problem


def test_only_what_can_be_computed_again_may_be_forbidden_to_stay() -> None:
    problem = chain([4] * 4, [1.0] * 3)
    for v in (0, 3, 4, 6):  # owned, an output, a tangent, a gradient
        with pytest.raises(InvalidProblem, match="may not be kept, so it must have bytes"):
            drop(problem, {v})
    fixed = replace(problem, ops=(replace(problem.ops[0], rerunnable=False), *problem.ops[1:]))
    with pytest.raises(InvalidProblem, match="a forward op that may be run again"):
        drop(fixed, {1})
