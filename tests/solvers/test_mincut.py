"""``mincut``: the saved bytes are the least there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain as flatten
from itertools import combinations

from hypothesis import given, settings
from strategies import problems

from remat.solvers.demand import always_kept
from remat.solvers.mincut import _is_heavy, least_saved, solve_mincut
from remat.solvers.problem import Op, Problem, Value
from remat.solvers.registry import Request
from remat.solvers.schedule import Decision, decisions
from remat.solvers.segments import Demands


def _narrow(**heavy: object) -> Problem:
    """wide (8) -> narrow (1) -> wide again (8); backward reads both wide ones."""
    values = (Value("p", 8, owned=True), Value("a", 8), Value("n", 1), Value("z", 8))
    ops = (
        Op("matmul", "forward", (0,), (1,), flops=100),
        replace(Op("squeeze", "forward", (1,), (2,)), **heavy),  # type: ignore[arg-type]
        Op("spread", "forward", (2,), (3,)),
        Op("b", "backward", (3,), ()),
    )
    return Problem(values, ops)


def test_the_narrow_place_is_saved():
    problem = _narrow()
    assert {problem.values[v].name for v in least_saved(problem)} == {"n"}
    schedule = solve_mincut(Request(problem, None)).schedule
    assert decisions(problem, schedule) == {2: Decision.KEEP, 3: Decision.RECOMPUTE}
    assert [problem.ops[i].name for i in schedule.computes][-2:] == ["spread", "b"]


def test_what_the_caller_owns_is_recomputed_from_for_nothing():
    values = (Value("p", 8, owned=True), Value("a", 8))
    ops = (Op("cast", "forward", (0,), (1,)), Op("b", "backward", (1,), ()))
    assert least_saved(Problem(values, ops)) == set()
    heavy = replace(ops[0], flops=1)
    assert least_saved(Problem(values, (heavy, ops[1]))) == {1}


def test_heavy_ops_are_those_of_the_stock_partitioner():
    problem = _narrow()
    plain = Op("o", "forward", (), (3,))
    assert not _is_heavy(problem, plain)
    assert _is_heavy(problem, replace(plain, flops=1))
    assert _is_heavy(problem, replace(plain, random=True))
    assert _is_heavy(problem, replace(plain, rerunnable=False))
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert _is_heavy(problem, replace(plain, target=flash))
    assert _is_heavy(problem, Op("sum", "forward", (1,), (2,)))
    assert not _is_heavy(problem, Op("half", "forward", (1,), (3,)))


def _is_enough(problem: Problem, saved: set[int]) -> bool:
    """Backward can be fed from ``saved`` and what is kept anyway, running no heavy op."""
    kept, demands = always_kept(problem), Demands.of(problem)
    there = {v for v, keep in enumerate(kept) if keep} | saved
    for index in problem.forward:
        op = problem.ops[index]
        if not _is_heavy(problem, op) and there.issuperset(op.reads):
            there.update(op.writes)
    forward = {v for index in problem.forward for v in problem.ops[index].writes}
    return all(v in there for v in forward if demands.last[v] >= 0)


@given(problems(max_forward=5))
@settings(max_examples=60, deadline=None)
def test_no_smaller_set_is_enough(problem):
    # Every set of forward values is tried.
    kept = always_kept(problem)
    free = [v for index in problem.forward for v in problem.ops[index].writes if not kept[v]]

    def weight(chosen: set[int]) -> int:
        return sum(problem.values[v].bytes for v in chosen if not kept[v])

    saved = least_saved(problem)
    assert _is_enough(problem, saved)
    subsets = flatten.from_iterable(combinations(free, size) for size in range(len(free) + 1))
    assert weight(saved) == min(weight({*s}) for s in subsets if _is_enough(problem, {*s}))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_budget_is_not_looked_at(problem):
    assert solve_mincut(Request(problem, 0)) == solve_mincut(Request(problem, None))
