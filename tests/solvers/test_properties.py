"""What must hold for every registered solver, on any valid problem."""

from __future__ import annotations

import math

import pytest
import strategies
from brute import least_peak, least_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.solvers import chain, choose, every_n_layers, greedy, mincut, sqrt  # noqa: F401
from remat.solvers.problem import Problem
from remat.solvers.registry import SOLVERS, Proposal, Request
from remat.solvers.segments import save_all
from remat.solvers.simulate import simulate

# They make one plan whatever the budget, and say so; the judge says whether it fits.
HEEDLESS = ("mincut", "every_n_layers")


def ask(name: str, problem: Problem, memory_budget: int | None, **options: int) -> Proposal:
    """One solver, bounded by evaluations and not by the clock."""
    return SOLVERS[name](Request(problem, memory_budget, max_evaluations=60, **options))


@st.composite
def budgets(draw, problem_strategy):
    """A problem and a budget from just under its least peak to what save-all takes."""
    problem = draw(problem_strategy)
    least, _ = least_peak(problem)
    return problem, draw(st.integers(max(0, least - 1), max(least, save_all(problem).peak)))


@pytest.mark.parametrize("name", sorted(SOLVERS))
@given(case=budgets(strategies.problems(max_deferred=2, layers=2)), every=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_judge_accepts_every_plan(name, case, every):
    problem, budget = case
    if name == "every_n_layers" and len(problem.forward) < 2:
        return
    proposal = ask(name, problem, budget, every_n_layers=every)
    if proposal.schedule is None:
        assert proposal.failures
        return
    timeline = simulate(problem, proposal.schedule)
    fastest = least_seconds(problem, timeline.peak)
    assert fastest is not None
    assert fastest[0] <= timeline.seconds
    assert timeline.peak >= least_peak(problem)[0]
    if least_seconds(problem, budget) is None:
        assert timeline.peak > budget
    elif proposal.lower_bound:
        assert proposal.lower_bound <= least_seconds(problem, budget)[0] * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - set(HEEDLESS)))
@given(problem=strategies.problems(max_deferred=2))
@settings(max_examples=30, deadline=None)
def test_with_room_for_everything_nothing_is_recomputed(name, problem):
    everything = save_all(problem)
    for budget in (everything.peak, None):
        proposal = ask(name, problem, budget)
        timeline = simulate(problem, proposal.schedule)
        assert timeline.seconds == everything.seconds
        assert budget is None or timeline.peak <= budget


@pytest.mark.parametrize("name", sorted(SOLVERS))
@given(case=budgets(strategies.problems(max_deferred=2, layers=2)))
@settings(max_examples=30, deadline=None)
def test_names_do_not_matter(name, case):
    problem, budget = case
    if name == "every_n_layers" and len(problem.forward) < 2:
        return
    one = ask(name, problem, budget)
    other = ask(name, strategies.renamed(problem), budget)
    assert one.schedule == other.schedule


@pytest.mark.parametrize("name", sorted(SOLVERS))
@given(problem=strategies.problems(max_deferred=2, layers=2))
@settings(max_examples=20, deadline=None)
def test_the_same_question_has_the_same_answer(name, problem):
    if name == "every_n_layers" and len(problem.forward) < 2:
        return
    budget = least_peak(problem)[0]
    assert ask(name, problem, budget) == ask(name, problem, budget)


@given(case=budgets(strategies.problems(max_deferred=2)))
@settings(max_examples=40, deadline=None)
def test_auto_fits_or_proves_that_nothing_does(case):
    problem, budget = case
    solution = choose.solve(problem, memory_budget=budget, max_evaluations=200)
    best = least_seconds(problem, budget)
    least, _ = least_peak(problem)
    assert solution.failures == ()
    assert solution.peak_lower_bound <= least <= solution.peak
    if best is None:
        assert not solution.fits
        assert (solution.status == "infeasible") == (budget < solution.peak_lower_bound)
        return
    assert solution.lower_bound <= best[0] + 1e-9
    if solution.fits:
        assert solution.peak <= budget
        assert solution.seconds >= best[0] - 1e-9
    if solution.status == "optimal":
        assert math.isclose(solution.seconds, best[0])


@given(
    case=budgets(strategies.chains(min_length=3, max_length=6, uniform=True)),
)
@settings(max_examples=20, deadline=None)
def test_auto_is_within_a_percent_of_chain_on_uniform_chains(case):
    problem, budget = case
    chained = simulate(problem, (ask("chain", problem, budget)).schedule)
    solution = choose.solve(problem, memory_budget=budget, max_evaluations=200)
    if chained.peak <= budget:
        assert solution.fits
        assert solution.seconds <= 1.01 * chained.seconds
