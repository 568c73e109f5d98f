"""``ilp`` proves optimality on small problems."""

from __future__ import annotations

import brute
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.choose import solve
from remat.solvers.problem import Problem


@settings(max_examples=40, deadline=None)
@given(problems(), st.floats(0, 1))
def test_what_it_calls_optimal_is(problem: Problem, share: float) -> None:
    least, _ = brute.least_peak(problem)
    keep = solve(problem, memory_budget=None)
    budget = int(least + share * (keep.peak - least))
    found = solve(problem, memory_budget=budget, solver="ilp", max_evaluations=500)
    optimum = brute.least_seconds(problem, budget)
    assert optimum is not None
    assert found.failures == ()
    assert found.lower_bound <= optimum[0] + 1e-6
    if found.status == "optimal":
        assert abs(found.seconds - optimum[0]) <= 1e-6


def test_it_proves_chains_optimal() -> None:
    for length in (4, 5, 6):
        problem = chain([4] * (length + 1), [1.0] * length)
        keep, (least, _) = solve(problem, memory_budget=None), brute.least_peak(problem)
        budget = (least + keep.peak) // 2
        found = solve(problem, memory_budget=budget, solver="ilp", max_evaluations=500)
        optimum = brute.least_seconds(problem, budget)
        assert optimum is not None
        assert found.status == "optimal"
        assert found.seconds == optimum[0] > keep.seconds
