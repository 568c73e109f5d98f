"""``sqrt``: cuts by bytes, O(sqrt(n)) memory on a chain, at most one recomputation an op."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from strategies import chain, problems

from remat.solvers.registry import Request
from remat.solvers.segments import save_all
from remat.solvers.simulate import simulate
from remat.solvers.sqrt import cut_positions, solve_sqrt


@pytest.mark.parametrize("length", [16, 64, 144])
def test_a_chain_takes_memory_of_the_order_of_its_root(length):
    problem = chain([1] * (length + 1), [1.0] * length)
    schedule = solve_sqrt(Request(problem, 0)).schedule
    timeline = simulate(problem, schedule)
    # sqrt(n) checkpoints, a segment of sqrt(n), and a few for the op that runs.
    assert timeline.peak <= 2 * math.sqrt(length) + 4
    assert timeline.seconds <= problem.base_seconds + length
    assert save_all(problem).peak >= length


def test_a_larger_budget_is_used_for_fewer_recomputations():
    problem = chain([1] * 65, [1.0] * 64)
    everything = save_all(problem).peak
    seconds = [
        simulate(problem, solve_sqrt(Request(problem, budget)).schedule).seconds
        for budget in range(20, everything + 1, 4)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert simulate(problem, solve_sqrt(Request(problem, everything)).schedule).seconds == 192.0


@given(problems(max_forward=6))
def test_no_op_runs_more_than_twice(problem):
    computes = Counter(solve_sqrt(Request(problem, 0)).schedule.computes)
    assert all(
        count <= (2 if problem.ops[index].phase == "forward" else 1)
        for index, count in computes.items()
    )


def test_cuts_are_counted_in_bytes():
    # One op makes as much as the ten before it: it gets a segment of its own.
    needed = [1] * 10 + [10] + [1] * 10
    assert cut_positions(needed, [1] * 21, 10) == (9, 10, 20)[:2]


def test_a_segment_ends_where_little_crosses():
    # Of the last 60 % of the segment the cut goes where 1 byte crosses, not where 9 do.
    needed, crossing = [1] * 10, [9, 9, 9, 9, 9, 9, 1, 9, 9, 9]
    assert cut_positions(needed, crossing, 9) == (6,)
    assert cut_positions(needed, crossing, math.inf) == ()


def test_nothing_to_cut():
    assert cut_positions([], [], 1.0) == ()
    assert cut_positions([0, 0, 0], [1, 1, 1], 0.0) == ()
