"""The layer over PuLP and HiGHS: status, bound and values come from HiGHS."""

from __future__ import annotations

import pytest

from remat.solvers.milp import MilpFailure, Model, _Highs


def knapsack(relaxed: bool = False) -> Model:
    """Leave out as little as possible: weights 3, 4, 5 into 8."""
    model = Model(relaxed)
    taken = [model.variable(-value) for value in (30.0, 39.0, 50.0)]
    model.at_most(list(zip(taken, (3.0, 4.0, 5.0), strict=True)), 8.0)
    return model


def test_an_integer_optimum() -> None:
    answer = knapsack().solve(time_limit=10.0)
    assert answer.outcome == "optimal"
    assert answer.objective == pytest.approx(-80)
    assert answer.bound == pytest.approx(-80)
    assert [round(value) for value in answer.values] == [1, 0, 1]


def test_a_relaxation_bounds_it() -> None:
    answer = knapsack(relaxed=True).solve(time_limit=10.0)
    assert answer.outcome == "optimal"
    assert answer.bound == answer.objective <= -80


def test_infeasible_is_said_and_has_no_plan() -> None:
    model = knapsack()
    model.at_least([(0, 1.0)], 2.0)
    answer = model.solve(time_limit=10.0)
    assert answer.outcome == "infeasible"
    assert answer.values == ()


def test_stopped_before_a_node_is_not_called_optimal() -> None:
    model = Model()
    weights = [37.0 + (i * 7919) % 101 for i in range(60)]
    taken = [model.variable(-w - (i * 31) % 7) for i, w in enumerate(weights)]
    for shift in range(5):
        row = [(x, weights[(i + 13 * shift) % 60]) for i, x in enumerate(taken)]
        model.at_most(row, sum(weights) / 2.1)
    answer = model.solve(time_limit=10.0, nodes=0)
    assert answer.outcome in ("feasible", "unknown")
    assert answer.bound < answer.objective


def test_an_empty_model_is_solved() -> None:
    assert Model().solve(time_limit=1.0).outcome == "optimal"


def test_variables_that_nothing_names_do_not_shift_the_others() -> None:
    model = Model()
    unnamed, wanted, also_unnamed = (model.variable() for _ in range(3))
    model.at_least([(wanted, 1.0)], 1.0)
    answer = model.solve(time_limit=10.0, start={unnamed: 1.0, wanted: 1.0})
    assert [round(answer.values[i]) for i in (unnamed, wanted, also_unnamed)] == [0, 1, 0]
    nothing = Model()
    nothing.variable()
    assert nothing.solve(time_limit=10.0).values == (0.0,)


def test_a_start_is_handed_over() -> None:
    answer = knapsack().solve(time_limit=10.0, start={0: 1.0, 1: 1.0, 2: 0.0})
    assert answer.objective == pytest.approx(-80)


def test_a_solver_that_breaks_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: _Highs, lp: object) -> None:
        raise RuntimeError("no licence for this")

    monkeypatch.setattr(_Highs, "callSolver", broken)
    with pytest.raises(MilpFailure, match="no licence for this"):
        knapsack().solve(time_limit=1.0)
