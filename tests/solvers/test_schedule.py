"""Schedules: where frees go, where forward ends, what was decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from strategies import chain, problems

from remat.solvers.errors import InvalidSchedule
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Decision, Schedule, Solution, Step, decisions
from remat.solvers.segments import replay
from remat.solvers.simulate import simulate

THREE = chain([1, 2, 3, 4], [1.0, 2.0, 4.0])
X1, X2 = 1, 2


def text(problem: Problem, schedule: Schedule) -> str:
    """``"f1 f2 -x1"``."""
    return " ".join(
        problem.ops[step.index].name
        if step.kind == "compute"
        else f"-{problem.values[step.index].name}"
        for step in schedule.steps
    )


def test_every_value_is_freed_after_its_last_read():
    schedule = Schedule.from_computes(THREE, range(6))
    assert text(THREE, schedule) == "f1 f2 f3 b3 -g3 -x2 b2 -g2 -x1 b1 -g1"


def test_an_instance_that_is_made_again_is_freed_before():
    schedule = Schedule.from_computes(THREE, [0, 1, 2, 3, 0, 4, 5])
    assert text(THREE, schedule) == "f1 f2 -x1 f3 b3 -g3 -x2 f1 b2 -g2 -x1 b1 -g1"


def test_what_nobody_reads_is_freed_at_once_unless_it_goes_out():
    values = (Value("x", 1), Value("y", 1, output="forward"), Value("g", 1, tangent=True))
    problem = Problem(values, (Op("f", "forward", (), (0, 1)), Op("b", "backward", (), ())))
    assert text(problem, Schedule.from_computes(problem, [0, 1])) == "f -x b"


@given(problems())
def test_free_comes_as_early_as_the_judge_allows(problem):
    computes = replay(problem, [0] * len(problem.values))
    schedule = Schedule.from_computes(problem, computes)
    assert list(schedule.computes) == computes
    simulate(problem, schedule)
    for position, step in enumerate(schedule.steps):
        before = schedule.steps[position - 1] if position else None
        if step.kind == "free" and before is not None and before.kind == "compute":
            op = problem.ops[before.index]
            if step.index not in op.writes:  # moved before the op that reads it: no longer valid
                moved = [*schedule.steps]
                moved[position - 1], moved[position] = step, before
                with pytest.raises(InvalidSchedule):
                    simulate(problem, Schedule(tuple(moved)))


def test_forward_ends_with_its_last_first_run_and_the_frees_behind_it():
    schedule = Schedule.from_computes(THREE, [0, 1, 2, 0, 1, 3, 0, 4, 5])
    boundary = schedule.boundary(THREE)
    assert text(THREE, Schedule(schedule.steps[:boundary])) == "f1 f2 -x1 f3 -x2"
    freed = Schedule(
        (*(Step("compute", i) for i in range(3)), Step("free", X1), Step("compute", 0))
    )
    assert freed.boundary(THREE) == 4


def test_a_transfer_behind_forward_belongs_to_backward():
    schedule = Schedule((*(Step("compute", i) for i in range(3)), Step("offload", X1)))
    assert schedule.boundary(THREE) == 3


def test_without_forward_or_backward_the_boundary_is_at_an_end():
    assert Schedule(()).boundary(Problem((), ())) == 0
    only_backward = Problem((), (Op("b", "backward", (), ()),))
    assert Schedule((Step("compute", 0),)).boundary(only_backward) == 0
    only_forward = Problem((), (Op("f", "forward", (), ()),))
    assert Schedule((Step("compute", 0),)).boundary(only_forward) == 1


def test_decisions_by_hand():
    kept = Schedule.from_computes(THREE, range(6))
    assert decisions(THREE, kept) == {X1: Decision.KEEP, X2: Decision.KEEP}
    again = Schedule.from_computes(THREE, [0, 1, 2, 3, 0, 4, 5])
    assert decisions(THREE, again) == {X1: Decision.RECOMPUTE, X2: Decision.KEEP}
    there = Schedule((*kept.steps[:3], Step("offload", X2), Step("wait", X2), *kept.steps[3:]))
    assert decisions(THREE, there) == {X1: Decision.KEEP, X2: Decision.OFFLOAD}
    simulate(THREE, there, Link(1.0, 1.0))


def test_a_value_that_comes_along_is_not_recomputed():
    # f makes x and y; x is dropped and made again, y stays: an output, or read before f runs again.
    values = (Value("x", 1), Value("y", 1, output="forward"))
    ops = (
        Op("f", "forward", (), (0, 1)),
        Op("b1", "backward", (1,), ()),
        Op("b2", "backward", (0,), ()),
    )
    for output in ("forward", None):
        problem = Problem((values[0], replace(values[1], output=output)), ops)
        schedule = Schedule.from_computes(problem, [0, 1, 0, 2])
        assert decisions(problem, schedule) == {0: Decision.RECOMPUTE, 1: Decision.KEEP}


@given(problems())
def test_decisions_cover_what_backward_reads(problem):
    problem = problem.unrestricted
    schedule = Schedule.from_computes(problem, replay(problem, [0] * len(problem.values)))
    backward = schedule.steps[schedule.boundary(problem) :]
    read = {v for s in backward if s.kind == "compute" for v in problem.ops[s.index].reads}
    forward = {v for index in problem.forward for v in problem.ops[index].writes}
    assert decisions(problem, schedule) == dict.fromkeys(sorted(read & forward), Decision.KEEP)


@pytest.mark.parametrize(
    ("seconds", "bound", "gap"), [(10.0, 9.0, 0.1), (10.0, 11.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_gap_is_a_share_of_the_plan(seconds, bound, gap):
    op = Op("f", "forward", (), (), seconds=seconds)
    problem = Problem((), (op,))
    schedule = Schedule((Step("compute", 0),))
    solution = Solution(
        problem_key=problem.key,
        schedule=schedule,
        timeline=simulate(problem, schedule),
        memory_budget=None,
        status="feasible",
        lower_bound=bound,
        peak_lower_bound=0,
        floor_op=-1,
        solver="none",
    )
    assert solution.gap == pytest.approx(gap)
    assert solution.fits
    assert not replace(solution, status="infeasible").fits
