"""The scheduler of transfers: held to the judge, and to plans worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, links, plans, problems

from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Decision, Schedule, decisions
from remat.solvers.search import Searcher
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.transfers import Trace, with_transfers
from remat.solvers.windows import windowed

# Four stages of 10 s and 10 bytes forward, 20 s backward; x4 and g4 are a loss and weigh nothing.
FOUR = chain([10] * 5, [10.0] * 4)
WIDER = Structure(FOUR, offloads=True)
X1, X2, X3 = 1, 2, 3
EVERYTHING = (*FOUR.forward, *FOUR.backward)
EVEN = Link(2.0, 2.0)  # a copy takes 5 s


def words(schedule: Schedule) -> str:
    """``"f1 +x1 f2 ?x1 -x1"``: the steps, as in the tests of the judge."""
    marks = {"offload": "+", "free": "-", "reload": "<", "wait": "?"}
    return " ".join(
        FOUR.ops[step.index].name
        if step.kind == "compute"
        else marks[step.kind] + FOUR.values[step.index].name
        for step in schedule.steps
    )


@st.composite
def cases(draw, **options):
    """A trace of a random plan, values that leave, values that return, a link and a budget."""
    problem = draw(problems(max_forward=5, max_backward=4, max_deferred=2, **options))
    trace = Trace.of(Structure(problem, offloads=True), draw(plans(problem)))
    stays = sorted(trace.stays)
    away = [v for v in stays if draw(st.booleans())]
    returning = [v for v in stays if draw(st.booleans())]
    budget = draw(st.none() | st.integers(0, int(trace.used.max(initial=0))))
    lead = draw(st.sampled_from((0.0, 1.0, math.inf)))
    plan = with_transfers(trace, away, draw(links()), budget, returning=returning, lead=lead)
    return plan, budget


def test_a_copy_leaves_at_once_and_comes_back_just_in_time():
    plan = with_transfers(Trace.of(WIDER, EVERYTHING), {X1}, EVEN, None)
    assert words(plan.schedule()) == (
        "f1 +x1 f2 ?x1 -x1 f3 f4 b4 -g4 -x3 <x1 b3 -g3 -x2 ?x1 b2 -x1 -g2 b1 -g1"
    )
    assert (plan.seconds, plan.waits) == (120.0, 0.0)
    assert decisions(FOUR, plan.schedule())[X1] is Decision.OFFLOAD


def test_a_budget_makes_computation_wait_for_a_copy():
    slow = Link(0.5, 2.0)  # out in 20 s: x1 would be there until the end of f3
    plan = with_transfers(Trace.of(WIDER, EVERYTHING), {X1}, slow, None)
    assert words(plan.schedule()).startswith("f1 +x1 f2 f3 ?x1 -x1 f4")
    assert simulate(FOUR, plan.schedule(), slow).forward_peak == 30
    tighter = with_transfers(Trace.of(WIDER, EVERYTHING), {X1}, slow, 20)
    assert words(tighter.schedule()).startswith("f1 +x1 f2 ?x1 -x1 f3")
    assert tighter.waits == 15.0  # 10 for that, and 5 before b2: while b3 runs there is no room


def test_reloads_move_ahead_of_each_other_and_wait_for_room():
    slow = Link(100.0, 0.5)  # back in 20 s, as long as a backward op takes
    plan = with_transfers(Trace.of(WIDER, EVERYTHING), {X1, X2}, slow, None)
    assert words(plan.schedule()).endswith(
        "<x2 b4 -g4 -x3 <x1 ?x2 b3 -x2 -g3 ?x1 b2 -x1 -g2 b1 -g1"
    )
    assert plan.waits == 0.0
    # While b4 runs there is room for x3 and g3 alone, and then for g3 and x2 and g2: both wait.
    tight = with_transfers(Trace.of(WIDER, EVERYTHING), {X1, X2}, slow, 30)
    assert tight.peak == 30
    assert tight.waits > 0.0


def test_what_leaves_last_meets_the_gradients_that_arrive():
    """The copy of what the last forward op writes ends in backward, where tangents are."""
    values = (Value("t", 1, tangent=True), Value("a", 0), Value("b", 1))
    ops = (
        Op("make_a", "forward", (), (1,)),
        Op("make_b", "forward", (), (2,)),
        Op("first", "backward", (1, 0), ()),
        Op("last", "backward", (1, 2), ()),
    )
    trace = Trace.of(Structure(Problem(values, ops), offloads=True), (0, 1, 2, 3))
    plan = with_transfers(trace, {2}, Link(0.01, 0.01), 0)
    timeline = simulate(trace.problem, plan.schedule(), plan.link)
    assert plan.offloaded == [2]
    assert plan.peak == timeline.peak == 2


def test_a_value_that_is_needed_before_it_is_gone_stays():
    slow = Link(0.01, 1.0)
    plan = with_transfers(Trace.of(WIDER, EVERYTHING), {X1, X3}, slow, None)
    assert plan.offloaded == []
    assert plan.schedule() == Schedule.from_computes(FOUR, EVERYTHING)


def test_what_returns_for_every_reader_is_away_in_between():
    problem = chain([10] * 5, [10.0] * 4, reads_output=True)  # b3 and b2 both read x2
    trace = Trace.of(Structure(problem, offloads=True), (*problem.forward, *problem.backward))
    apart = Trace.of(trace.structure, trace.computes)
    stay = apart.stays[X2]
    assert len(stay.readers) == 2
    assert stay.readers[1] == stay.readers[0] + 1  # one after the other: one visit is enough
    plan = with_transfers(apart, {X2}, EVEN, None, returning={X2})
    assert len(plan.visits) == 1


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_judge_agrees_on_seconds_and_bytes(case):
    plan, budget = case
    problem = plan.trace.problem
    timeline = simulate(problem, plan.schedule(), plan.link)
    assert timeline.seconds == pytest.approx(plan.seconds, rel=1e-12)
    assert timeline.peak <= plan.peak
    if all(op.workspace >= 0 for op in problem.ops):
        assert timeline.peak == plan.peak
    assert plan.seconds == pytest.approx(plan.trace.clock[-1] + plan.waits)
    kinds = [step.kind for step in plan.schedule().steps]
    assert kinds.count("offload") == len(plan.offloaded) <= kinds.count("reload")
    assert not plan.late
    if budget is None and not plan.returning:
        assert plan.peak <= plan.trace.used.max(initial=problem.fixed_bytes)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_windows_take_the_bytes_that_transfers_take(case):
    plan, _ = case
    fixed = windowed(plan)
    timeline = simulate(fixed.problem, Schedule.from_computes(fixed.problem, fixed.computes))
    assert fixed.restore(fixed.computes) == plan.trace.computes
    problem, computes = plan.trace.problem, plan.trace.computes
    again = any(computes.count(problem.producer[v]) > 1 for v in plan.offloaded)
    if all(op.workspace >= 0 for op in problem.ops):
        assert timeline.peak <= plan.peak if again else timeline.peak == plan.peak


@given(cases())
@settings(max_examples=10, deadline=None)
def test_the_compiled_evaluator_sees_the_same_windows(case):
    plan, _ = case
    fixed = windowed(plan)
    schedule = Schedule.from_computes(fixed.problem, fixed.computes)
    found = Searcher(Structure(fixed.problem)).found(schedule)
    assert found is not None
    assert found.peak == simulate(fixed.problem, schedule).peak


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_faster_link_is_never_slower_for_the_same_schedule(case):
    plan, _ = case
    link = Link(2 * plan.link.offload_bandwidth, 2 * plan.link.reload_bandwidth, plan.link.latency)
    timeline = simulate(plan.trace.problem, plan.schedule(), link)
    assert timeline.seconds <= plan.seconds * (1 + 1e-12)
    assert timeline.peak <= plan.peak
