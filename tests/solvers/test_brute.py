"""The yardstick itself: brute force against hand-made optima and the judge."""

from __future__ import annotations

from brute import least_peak, least_seconds
from hypothesis import given
from strategies import chain, chains, problems

from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate


@given(problems())
def test_the_judge_agrees_with_brute_force(problem):
    peak, schedule = least_peak(problem)
    assert simulate(problem, schedule).peak == peak
    seconds, fastest = least_seconds(problem, peak)
    timeline = simulate(problem, fastest)
    assert (timeline.seconds, timeline.peak) == (seconds, peak)
    assert least_seconds(problem, peak - 1) is None


@given(problems())
def test_without_a_budget_every_demanded_op_runs_once(problem):
    problem = problem.unrestricted  # what may not be kept is made a second time
    seconds, schedule = least_seconds(problem, None)
    assert len(set(schedule.computes)) == len(schedule.computes)
    assert seconds == sum(problem.ops[i].seconds for i in schedule.computes)


@given(chains())
def test_more_bytes_never_cost_more_seconds(problem):
    least, _ = least_peak(problem)
    most = simulate(problem, Schedule.from_computes(problem, range(len(problem.ops)))).peak
    seconds = [least_seconds(problem, budget)[0] for budget in range(least, most + 1)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == problem.base_seconds


def test_chain_of_three_by_hand():
    # Save-all holds x1 and x2, then x1, x2, g2 (3 units) at b3. Dropping x1 in forward is no help:
    # b2 needs x1, g2 and g1. So 3 is the least, and nothing is run again.
    problem = chain([1, 1, 1, 1], [1.0, 1.0, 1.0])
    peak, _ = least_peak(problem)
    assert peak == 3
    assert least_seconds(problem, 3)[0] == 9.0


def test_chain_of_four_by_hand():
    # Save-all peaks at b4 with x1, x2, x3, g3: 4 units. With 3 units, one of x1, x2 is dropped
    # before b4 and run again, and no other op is: 1 second more than the 12 of save-all.
    problem = chain([1] * 5, [1.0] * 4)
    assert least_peak(problem)[0] == 3
    assert least_seconds(problem, 4)[0] == 12.0
    assert least_seconds(problem, 3)[0] == 13.0
