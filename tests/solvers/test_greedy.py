"""``greedy``: the cheapest byte goes first; it fits where that is easy."""

from __future__ import annotations

import pytest
from brute import least_peak
from hypothesis import given, settings
from strategies import chain, chains

from remat.solvers.greedy import solve_greedy
from remat.solvers.problem import Op, Problem, Value
from remat.solvers.registry import Request
from remat.solvers.schedule import Decision, decisions
from remat.solvers.segments import save_all
from remat.solvers.simulate import simulate


def _fan(sizes: list[int], seconds: list[float]) -> Problem:
    """Values made from nothing in forward, all read by one op at the end of backward."""
    count = len(sizes)
    values = [Value(f"x{i}", size) for i, size in enumerate(sizes)]
    values += [Value("big", 100), Value("g", 0, tangent=True)]
    ops = [Op(f"f{i}", "forward", (), (i,), seconds=seconds[i]) for i in range(count)]
    ops += [
        Op("peak", "backward", (count + 1,), (count,)),
        Op("middle", "backward", (count,), ()),
        Op("last", "backward", tuple(range(count)), ()),
    ]
    return Problem(tuple(values), tuple(ops))


def test_the_cheapest_byte_goes_first():
    # Seconds a byte: 1/10, 3/10, 2/4. Ten bytes must go: x0 does it alone.
    problem = _fan([10, 10, 4], [1.0, 3.0, 2.0])
    proposal = solve_greedy(Request(problem, 114))
    assert decisions(problem, proposal.schedule) == {
        0: Decision.RECOMPUTE,
        1: Decision.KEEP,
        2: Decision.KEEP,
    }
    assert simulate(problem, proposal.schedule).peak == 114


def test_cost_is_recursive():
    # x1 alone is cheap, but its input z is not needed by backward and would run again with it.
    values = (
        Value("z", 1),
        Value("x1", 10),
        Value("x2", 10),
        Value("big", 100),
        Value("g", 0, tangent=True),
    )
    ops = (
        Op("make z", "forward", (), (0,), seconds=9.0),
        Op("f1", "forward", (0,), (1,), seconds=1.0),
        Op("f2", "forward", (), (2,), seconds=5.0),
        Op("peak", "backward", (4,), (3,)),
        Op("middle", "backward", (3,), ()),
        Op("last", "backward", (1, 2), ()),
    )
    problem = Problem(values, ops)
    schedule = solve_greedy(Request(problem, 110)).schedule
    assert decisions(problem, schedule) == {1: Decision.KEEP, 2: Decision.RECOMPUTE}


def test_what_may_not_run_again_stays():
    problem = _fan([10, 10], [1.0, 9.0])
    once = Op("f0", "forward", (), (0,), seconds=1.0, rerunnable=False)
    problem = Problem(problem.values, (once, *problem.ops[1:]))
    schedule = solve_greedy(Request(problem, 110)).schedule
    assert decisions(problem, schedule) == {0: Decision.KEEP, 1: Decision.RECOMPUTE}


@given(problem=chains(max_length=6, uniform=True))
@settings(max_examples=40, deadline=None)
def test_uniform_chains_fit_wherever_they_can(problem):
    for budget in range(least_peak(problem)[0], save_all(problem).peak + 1):
        assert simulate(problem, solve_greedy(Request(problem, budget)).schedule).peak <= budget


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_long_chain_fits(share):
    problem = chain([4 + i % 5 for i in range(101)], [1.0 + i % 3 for i in range(100)])
    budget = int(share * save_all(problem).peak)
    timeline = simulate(problem, solve_greedy(Request(problem, budget)).schedule)
    assert timeline.peak <= budget
    assert timeline.seconds <= 1.6 * problem.base_seconds


def test_no_evaluations_are_no_rounds():
    problem = chain([4] * 21, [1.0] * 20)
    budget = save_all(problem).peak // 2
    proposal = solve_greedy(Request(problem, budget, max_evaluations=0))
    assert simulate(problem, proposal.schedule).peak == save_all(problem).peak
    assert simulate(problem, solve_greedy(Request(problem, budget)).schedule).peak <= budget


def test_a_hopeless_budget_gets_the_least_peak_on_the_way():
    problem = chain([4] * 21, [1.0] * 20)
    timeline = simulate(problem, solve_greedy(Request(problem, 1)).schedule)
    assert 1 < timeline.peak < save_all(problem).peak / 3
