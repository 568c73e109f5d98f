"""The search from known plans, and what happens before its code is compiled."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers import auto, cold, ilp
from remat.solvers.choose import least_peak, solve
from remat.solvers.keep import keep_everything
from remat.solvers.onecut import CutAnswer
from remat.solvers.problem import Problem
from remat.solvers.registry import Request
from remat.solvers.search import Effort, Searcher, undominated
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

NEVER = float("inf")


@settings(max_examples=40, deadline=None)
@given(problems(max_forward=8, max_deferred=2, max_backward=7), st.integers(0, 4))
def test_improve_returns_what_the_judge_confirms(problem: Problem, seed: int) -> None:
    searcher = Searcher(Structure(problem), seed)
    keep = searcher.found(keep_everything(problem))
    assert keep is not None
    least = searcher.lower([*searcher.seeds, keep], 0, Effort(NEVER, 500))
    assert least is not None
    budget = (least.peak + keep.peak) // 2
    found = searcher.improve([least], budget, Effort(NEVER, 500))
    timeline = simulate(problem, searcher.schedule(found))
    assert timeline.peak == found.peak <= budget
    assert timeline.seconds == found.seconds <= least.seconds


def test_lowering_reaches_the_floor_of_a_chain() -> None:
    problem = chain([8] * 33, [1.0] * 32)
    found = least_peak(problem, max_evaluations=20_000)
    assert found.peak == found.peak_lower_bound


def test_undominated_plans_trade_peak_for_seconds() -> None:
    problem = chain([8] * 17, [1.0] * 16)
    front = undominated(Searcher(Structure(problem)).seeds * 2)
    assert [plan.peak for plan in front] == sorted({plan.peak for plan in front})
    assert [plan.seconds for plan in front] == sorted({plan.seconds for plan in front})[::-1]


def test_an_effort_is_shared_out_and_used_up() -> None:
    effort = Effort(NEVER, 100)
    part = effort.part(0.25)
    assert part.max_evaluations == 25
    part.spent = 30
    effort.charge(part)
    assert effort.used == 0.3
    effort.spent = 100
    assert effort.over
    assert Effort(NEVER, 0).over
    assert Effort(time.monotonic() - 1.0).over


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = cold.Kernels()
    monkeypatch.setattr(kernels, "wait", lambda seconds: False)
    monkeypatch.setattr(auto, "KERNELS", kernels)
    monkeypatch.setattr(ilp, "KERNELS", kernels)


@pytest.mark.usefixtures("uncompiled")
def test_before_the_kernels_are_compiled_plans_are_found_all_the_same() -> None:
    problem = chain([8] * 33, [1.0] * 32)
    keep = solve(problem, memory_budget=None)
    found = solve(problem, memory_budget=keep.peak // 2, time_limit=2.0)
    assert found.fits
    assert found.failures == ("the compiled search was not ready in time",)
    least = least_peak(problem, time_limit=1.0)
    assert least.peak < keep.peak // 2


@pytest.mark.usefixtures("uncompiled")
def test_that_nothing_is_cached_is_said_where_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "UNCACHED", ["machine code is not cached: why"])
    least = least_peak(chain([8] * 9, [1.0] * 8), time_limit=0.1)
    assert least.failures[-1] == "machine code is not cached: why"


@pytest.mark.usefixtures("uncompiled")
def test_ilp_says_that_it_could_not_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ilp, "one_cut", lambda *arguments, **options: CutAnswer("unknown", 0.0))
    monkeypatch.setattr(ilp, "many_cuts", lambda *arguments, **options: None)
    problem = chain([8] * 9, [1.0] * 8)
    budget = solve(problem, memory_budget=None).peak - 8
    proposal = ilp.solve_ilp(Request(problem, budget, max_evaluations=10))
    assert proposal.failures == ("the compiled search was not ready in time",)


def test_kernels_that_cannot_be_compiled_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> None:
        raise OSError("no room on the disk")

    monkeypatch.setattr(cold, "exercise_kernels", break_down)
    kernels = cold.Kernels()
    assert not kernels.wait(None)
    assert kernels.failure == "compiled search: OSError: no room on the disk"
