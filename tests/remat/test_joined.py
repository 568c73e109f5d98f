"""Several problems as one: the same bytes, the same steps, split again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.joined import Phase, join
from remat.plan_rows import kept_bytes
from remat.solvers.choose import solve
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from tests.remat.conftest import BASELINE, PROBLEM, RECOMPUTES_A

CALL = replace(PROBLEM, fixed_bytes=0)
NESTED = (
    Phase("forward", 0, 0),
    Phase("eager", -1, 30),
    Phase("forward", 1, 4),
    Phase("backward", 1, 8),
    Phase("backward", 0, 22),
    Phase("eager", -1, 50),
)


@pytest.mark.parametrize("first", [BASELINE, RECOMPUTES_A])
@pytest.mark.parametrize("second", [BASELINE, RECOMPUTES_A])
def test_a_joined_schedule_is_split_into_its_parts(first: Schedule, second: Schedule) -> None:
    joined = join((CALL, CALL), NESTED, 1000)
    whole = joined.schedule((first, second))
    assert [part.computes for part in joined.split(whole)] == [first.computes, second.computes]
    seconds = sum(simulate(CALL, part).seconds for part in (first, second))
    assert simulate(joined.problem, whole).seconds == pytest.approx(seconds)


def test_the_peak_of_every_phase_by_hand() -> None:
    joined = join((CALL, CALL), NESTED, 1000)
    whole = joined.schedule((RECOMPUTES_A, BASELINE))
    timeline = simulate(joined.problem, whole)
    kept, all_kept = kept_bytes(CALL, RECOMPUTES_A), kept_bytes(CALL, BASELINE)
    assert (kept, all_kept) == (200, 300)
    assert joined.peaks(whole, timeline) == (
        1000 + 300,  # a and b are made; the loss when a is gone
        1000 + kept + 30,
        1000 + kept + 4 + all_kept + 4,
        1000 + kept + 8 + all_kept + 4 + 200,  # its backward as alone, without the loss
        1000 + 22 + 4 + 400,
        1000 + 50,
    )
    assert timeline.peak == max(joined.peaks(whole, timeline))


def test_one_call_with_nothing_beside_is_the_problem_itself() -> None:
    phases = (Phase("forward", 0, 0), Phase("backward", 0, 4))  # the loss is beside its backward
    joined = join((CALL,), phases, 1000)
    for schedule in (BASELINE, RECOMPUTES_A):
        alone = simulate(PROBLEM, schedule)
        assert simulate(joined.problem, joined.schedule((schedule,))).peak == alone.peak


def test_the_solver_shares_the_bytes() -> None:
    joined = join((CALL, CALL), NESTED, 1000)
    keep = simulate(joined.problem, joined.schedule((BASELINE, BASELINE)))
    solution = solve(joined.problem, memory_budget=keep.peak - 50, time_limit=1, max_evaluations=50)
    assert solution.fits
    assert 0 < solution.seconds - keep.seconds <= 1.0  # the first call's a: one second
    # Both calls hold theirs at the peak: one of them computes again, either will do.
    parts = sorted(part.computes for part in joined.split(solution.schedule))
    assert parts == sorted((RECOMPUTES_A.computes, BASELINE.computes))


def test_what_forward_returns_is_free_to_its_own_backward() -> None:
    values = tuple(
        replace(value, output="forward") if value.name == "b" else value for value in CALL.values
    )
    problem = Problem(values, CALL.ops)
    joined = join((problem,), (Phase("forward", 0, 0), Phase("backward", 0, 204)), 0)
    schedule = Schedule.from_computes(problem, BASELINE.computes)
    assert kept_bytes(problem, schedule) == 100
    timeline = simulate(joined.problem, joined.schedule((schedule,)))
    # The incoming gradient is held until backward has returned.
    assert timeline.peak == simulate(problem, schedule).peak
