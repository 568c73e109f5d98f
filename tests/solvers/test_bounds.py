"""No bound is above what brute force reaches."""

from __future__ import annotations

import math

import brute
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.bounds import floor
from remat.solvers.manycut import many_cuts
from remat.solvers.onecut import one_cut
from remat.solvers.problem import Op, Problem, Value
from remat.solvers.prove import Prover
from remat.solvers.registry import Request
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

TOLERANCE = 1e-6


@settings(max_examples=80, deadline=None)
@given(problems(max_deferred=2))
def test_floor_is_never_above_the_least_peak(problem: Problem) -> None:
    assert floor(problem)[0] <= brute.least_peak(problem)[0]


def test_floor_names_the_op_and_counts_workspace_and_fixed_bytes() -> None:
    problem = Problem(
        (Value("x", 5), Value("t", 2, tangent=True), Value("g", 7, output="backward")),
        (
            Op("f", "forward", (), (0,)),
            Op("b", "backward", (0, 1), (2,), workspace=4),
        ),
        fixed_bytes=100,
    )
    assert floor(problem) == (100 + 5 + 2 + 7 + 4, 1)


def test_floor_of_nothing_is_what_is_always_there() -> None:
    assert floor(Problem((), (), fixed_bytes=3)) == (3, -1)


def test_floor_keeps_what_may_not_run_again() -> None:
    values = (Value("x", 5), Value("t", 2, tangent=True), Value("big", 50))
    ops = (
        Op("f", "forward", (), (0,), rerunnable=False),
        Op("b0", "backward", (1,), (2,)),
        Op("b1", "backward", (0,), ()),
    )
    assert floor(Problem(values, ops)) == (57, 1)


@settings(max_examples=60, deadline=None)
@given(problems(max_deferred=2), st.floats(0, 1), st.booleans())
def test_one_cut_is_never_above_the_optimum(problem: Problem, share: float, relaxed: bool) -> None:
    structure = Structure(problem)
    least, _ = brute.least_peak(problem)
    budget = least + int(share * 10)
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    for cut in range(len(structure.order)):
        answer = one_cut(structure, budget, cut, relaxed=relaxed, gap=0.0)
        assert answer.outcome != "infeasible"
        assert answer.lower_bound <= optimum[0] + TOLERANCE


@settings(max_examples=60, deadline=None)
@given(problems(max_deferred=2), st.floats(0, 1), st.booleans(), st.data())
def test_many_cuts_are_never_above_the_optimum(
    problem: Problem, share: float, relaxed: bool, data: st.DataObject
) -> None:
    structure = Structure(problem)
    backward = range(structure.forward_end, len(structure.order))
    least, _ = brute.least_peak(problem)
    budget = least + int(share * 10)
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    cuts = data.draw(st.sets(st.sampled_from(backward))) if backward else set()
    answer = many_cuts(structure, budget, sorted(cuts), relaxed=relaxed, gap=0.0)
    assert answer is not None
    assert answer.outcome != "infeasible"
    assert answer.lower_bound <= optimum[0] + TOLERANCE


def test_a_cut_that_nothing_fits_through_proves_it() -> None:
    values = (Value("x", 5), Value("t", 2, tangent=True))
    ops = (Op("f", "forward", (), (0,), seconds=1.0), Op("b", "backward", (0, 1), ()))
    structure = Structure(Problem(values, ops))
    answer = one_cut(structure, 6, 1)
    assert answer.outcome == "infeasible"
    assert answer.lower_bound == math.inf


@settings(max_examples=80, deadline=None)
@given(problems(max_deferred=2), st.data())
def test_only_budgets_that_nothing_fits_are_called_infeasible(
    problem: Problem, data: st.DataObject
) -> None:
    structure = Structure(problem)
    least, _ = brute.least_peak(problem)
    budget = data.draw(st.integers(max(0, floor(problem)[0] - 1), least + 2))
    for cut in range(len(structure.order)):
        if (
            one_cut(structure, budget, cut, relaxed=data.draw(st.booleans())).outcome
            == "infeasible"
        ):
            assert budget < least


@settings(max_examples=40, deadline=None)
@given(problems(max_deferred=2), st.floats(0, 1), st.integers(1, 4))
def test_what_several_cuts_report_is_true(problem: Problem, share: float, count: int) -> None:
    structure = Structure(problem)
    if structure.forward_end == len(structure.order):
        return
    least, _ = brute.least_peak(problem)
    budget = least + int(share * 10)
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    heard: list[tuple[float, Schedule | None]] = []
    prover = Prover(
        Request(problem, budget, max_evaluations=1),
        structure,
        budget,
        lambda bound, plan: heard.append((bound, plan)),
        lambda: math.inf,
    )
    prover._several(prover._spread(count))
    assert not prover.infeasible
    assert heard
    for bound, plan in heard:
        assert bound <= optimum[0] + TOLERANCE
        if plan is not None:
            assert simulate(problem, plan).seconds >= structure.required_seconds - TOLERANCE


def test_several_cuts_prove_and_plan_what_one_cannot() -> None:
    problem = chain([4] * 9, [1.0] * 8)
    structure = Structure(problem)
    least, _ = brute.least_peak(problem)
    heard: list[tuple[float, Schedule | None]] = []
    prover = Prover(
        Request(problem, least, max_evaluations=1),
        structure,
        least,
        lambda bound, plan: heard.append((bound, plan)),
        lambda: math.inf,
    )
    prover._one(prover._ranked_cuts()[0])
    one = max(bound for bound, _ in heard)
    prover._several(prover._spread(8))
    assert max(bound for bound, _ in heard) > one + TOLERANCE
    assert heard[-1][1] is not None
