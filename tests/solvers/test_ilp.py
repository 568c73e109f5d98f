"""``ilp`` proves optimality on small problems."""

from __future__ import annotations

from typing import Any

import brute
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers import ilp, prove
from remat.solvers.choose import solve
from remat.solvers.keep import keep_everything
from remat.solvers.manycut import CutsAnswer
from remat.solvers.milp import NODES
from remat.solvers.onecut import CutAnswer
from remat.solvers.problem import Problem
from remat.solvers.registry import Request
from remat.solvers.simulate import simulate


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


@pytest.mark.parametrize("solver", ["auto", "ilp"])
def test_where_evaluations_are_counted_every_model_has_a_node_limit(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    limits: list[Any] = []

    def asked(answer: CutAnswer) -> Any:
        def ask(*arguments: object, **options: Any) -> CutAnswer:
            if not options.get("relaxed"):
                limits.append(options.get("nodes"))
            return answer

        return ask

    for module in (ilp, prove):
        monkeypatch.setattr(module, "one_cut", asked(CutAnswer("feasible", 0.0)))
        monkeypatch.setattr(module, "many_cuts", asked(CutsAnswer("feasible", 0.0)))
    problem = chain([4] * 8, [1.0] * 7)
    budget = solve(problem, memory_budget=None).peak - 4
    solve(problem, memory_budget=budget, solver=solver, max_evaluations=50)
    assert limits
    assert set(limits) == {NODES}


def test_no_evaluations_mend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "one_cut", lambda *arguments, **options: CutAnswer("unknown", 0.0))
    monkeypatch.setattr(ilp, "many_cuts", lambda *arguments, **options: None)
    problem = chain([4] * 8, [1.0] * 7)
    keep = simulate(problem, keep_everything(problem)).peak
    for most, mended in ((0, False), (500, True)):
        plan = ilp.solve_ilp(Request(problem, keep - 4, max_evaluations=most)).schedule
        assert plan is not None
        assert (simulate(problem, plan).peak < keep) == mended
