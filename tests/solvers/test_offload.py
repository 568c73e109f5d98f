"""What ``auto`` does with a link: never slower, never over, and bounds that hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, chains, links, plans, problems

from remat.solvers.bounds import floor
from remat.solvers.choose import least_peak, solve
from remat.solvers.frontier import frontier
from remat.solvers.keep import keep_everything
from remat.solvers.linkcut import link_cut
from remat.solvers.offload import least_peak_with_offload
from remat.solvers.onecut import one_cut
from remat.solvers.problem import Link
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.transfers import Trace, with_transfers

EFFORT = 60
ENDLESS = Link(math.inf, math.inf)
SLOWEST = Link(1e-12, 1e-12)
LONG = chain([10] * 9, [10.0] * 8)


@st.composite
def budgets(draw, problem_strategy):
    """A problem and a budget from just under the floor with a link to keeping everything."""
    problem = draw(problem_strategy)
    least = floor(problem, Structure(problem, offloads=True))[0]
    most = simulate(problem, keep_everything(problem)).peak
    return problem, draw(st.integers(max(0, least - 1), max(least, most)))


def transfers(solution) -> int:
    return sum(step.kind == "offload" for step in solution.schedule.steps)


@given(
    case=budgets(problems(max_forward=5, max_deferred=2, max_backward=4) | chains(max_length=6)),
    link=links(),
)
@settings(max_examples=60, deadline=None)
def test_a_link_never_makes_a_plan_slower_and_every_plan_is_valid(case, link):
    problem, budget = case
    alone = solve(problem, memory_budget=budget, max_evaluations=EFFORT)
    linked = solve(problem, memory_budget=budget, max_evaluations=EFFORT, link=link)
    assert linked.failures == ()
    timeline = simulate(problem, linked.schedule, link)
    assert timeline == linked.timeline
    assert linked.lower_bound <= linked.seconds * (1 + 1e-9)
    assert linked.peak_lower_bound <= linked.peak
    assert linked.fits == (linked.peak <= budget)
    if alone.fits:
        assert linked.fits
        assert linked.seconds <= alone.seconds * (1 + 1e-9)
        assert linked.lower_bound <= alone.seconds * (1 + 1e-6)
    else:
        assert linked.peak <= alone.peak
    assert linked.peak_lower_bound <= alone.peak_lower_bound


@given(case=budgets(problems(max_forward=5, max_backward=4) | chains(max_length=6)))
@settings(max_examples=30, deadline=None)
def test_an_endlessly_slow_link_is_not_used(case):
    problem, budget = case
    alone = solve(problem, memory_budget=budget, max_evaluations=EFFORT)
    linked = solve(problem, memory_budget=budget, max_evaluations=EFFORT, link=SLOWEST)
    if alone.fits:
        assert transfers(linked) == 0
        assert linked.seconds == alone.seconds


@given(case=budgets(problems(max_forward=5, max_backward=4) | chains(max_length=6)))
@settings(max_examples=40, deadline=None)
def test_an_endless_link_costs_nothing_where_everything_may_be_away(case):
    problem, budget = case
    structure = Structure(problem, offloads=True)
    trace = Trace.of(structure, keep_everything(problem).computes)
    away = with_transfers(trace, trace.stays, ENDLESS, 0)
    linked = solve(problem, memory_budget=budget, max_evaluations=EFFORT, link=ENDLESS)
    if away.peak <= budget:
        assert linked.seconds == pytest.approx(structure.required_seconds)
        assert linked.status == "optimal"


@given(
    data=st.data(),
    problem=problems(max_forward=5, max_deferred=2, max_backward=4) | chains(max_length=6),
    link=links(),
)
@settings(max_examples=120, deadline=None)
def test_no_plan_beats_the_bound_of_a_cut(data, problem, link):
    structure = Structure(problem, offloads=True)
    trace = Trace.of(structure, data.draw(plans(problem)))
    stays = sorted(trace.stays)
    away = [v for v in stays if data.draw(st.booleans())]
    returning = [v for v in away if data.draw(st.booleans())]
    budget = data.draw(st.none() | st.integers(0, int(trace.used.max(initial=0))))
    plan = with_transfers(trace, away, link, budget, returning=returning)
    assert floor(problem, structure)[0] <= plan.peak
    if not structure.order:
        return
    cut = data.draw(st.integers(0, len(structure.order) - 1))
    answer = link_cut(structure, plan.peak, cut, link, relaxed=data.draw(st.booleans()))
    assert answer.outcome != "infeasible"
    assert answer.lower_bound <= plan.seconds * (1 + 1e-6)


@given(case=budgets(chains(min_length=3, max_length=6)), cut=st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_a_link_only_lowers_the_bound_of_a_cut(case, cut):
    problem, budget = case
    structure = Structure(problem)
    cut %= len(structure.order)
    alone = one_cut(structure, budget, cut)
    for link in (Link(1.0, 1.0), SLOWEST):
        wider = link_cut(replace(structure, offloads=True), budget, cut, link)
        assert wider.lower_bound <= alone.lower_bound * (1 + 1e-6)


@given(problem=problems(max_forward=5, max_backward=4) | chains(max_length=6), link=links())
@settings(max_examples=30, deadline=None)
def test_the_least_peak_with_a_link_is_no_larger(problem, link):
    alone = least_peak(problem, max_evaluations=EFFORT)
    linked = least_peak(problem, max_evaluations=EFFORT, link=link)
    assert linked.peak_lower_bound <= linked.peak <= alone.peak
    assert linked.memory_budget == linked.peak
    assert linked.failures == ()
    assert simulate(problem, linked.schedule, link).peak == linked.peak


def test_a_chain_at_the_floor_of_offloading():
    alone = least_peak(LONG, max_evaluations=200)
    linked = least_peak(LONG, link=Link(1.0, 1.0), max_evaluations=200)
    assert linked.peak == linked.peak_lower_bound == least_peak_with_offload(LONG) == 30
    assert alone.peak >= linked.peak


@pytest.mark.parametrize("budget", [40, 50, 60])
def test_more_bandwidth_is_never_slower_and_useful_offloading_saves_time(budget):
    seconds = [solve(LONG, memory_budget=budget, max_evaluations=200).seconds]
    for bandwidth in (0.5, 1.0, 2.0, 8.0):
        link = Link(bandwidth, bandwidth)
        solution = solve(LONG, memory_budget=budget, max_evaluations=200, link=link)
        seconds.append(solution.seconds)
        assert solution.peak <= budget
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == LONG.base_seconds
    assert seconds[0] > LONG.base_seconds


def test_a_plan_of_a_slower_link_is_a_start_for_a_faster_one():
    slow = solve(LONG, memory_budget=40, max_evaluations=200, link=Link(1.0, 1.0))
    fast = solve(
        LONG, memory_budget=40, max_evaluations=0, link=Link(2.0, 2.0), starts=[slow.schedule]
    )
    assert fast.seconds <= slow.seconds


def test_a_frontier_with_a_link_is_monotone_and_under_that_without():
    link = Link(1.0, 1.0)
    alone = frontier(LONG, [40, 50, 60, 80], max_evaluations=100)
    linked = frontier(LONG, [30, 40, 50, 60, 80], max_evaluations=100, link=link)
    seconds = [solution.seconds for solution in linked]
    assert all(solution.fits for solution in linked)
    assert seconds == sorted(seconds, reverse=True)
    assert all(ours.seconds <= other.seconds for ours, other in zip(linked[1:], alone, strict=True))
    ends = frontier(LONG, points=3, max_evaluations=50, link=link)
    assert (ends[0].peak, ends[-1].seconds) == (30, LONG.base_seconds)


@pytest.mark.parametrize("solver", ["ilp", "keep", "chain", "sqrt"])
def test_what_is_proven_without_a_link_is_not_claimed_with_one(solver):
    link = Link(math.inf, math.inf)
    alone = solve(LONG, memory_budget=50, solver=solver, max_evaluations=100)
    linked = solve(LONG, memory_budget=50, solver=solver, max_evaluations=100, link=link)
    assert linked.lower_bound == LONG.base_seconds <= alone.lower_bound
    assert linked.status != "infeasible"


def test_waits_of_many_steps_are_no_proof_that_nothing_fits():
    hour = Link(1.0, 1.0, latency=300.0)  # a copy takes four times the step
    structure = Structure(LONG, offloads=True)
    budget = floor(LONG, structure)[0]
    for cut in range(len(structure.order)):
        assert link_cut(structure, budget, cut, hour).outcome != "infeasible"
