"""``auto`` uses its time while nothing fits, and judges every plan that was found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from strategies import chain

from remat.solvers import auto, cold
from remat.solvers.choose import solve
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Found, Searcher
from remat.solvers.structure import Structure

PROBLEM = chain([4] * 8, [1.0] * 7)
BUDGET = solve(PROBLEM, memory_budget=None).peak - 8


def plan_within(problem: Problem, budget: int) -> tuple[float, Schedule]:
    found = solve(problem, memory_budget=budget, max_evaluations=1500)
    assert found.fits
    return found.seconds, found.schedule


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing that fits by itself, and gives up at once."""
    monkeypatch.setattr(auto.Auto, "_first_plans", lambda self, searcher, effort: [])
    monkeypatch.setattr(Searcher, "lower", lambda self, starts, target, effort: starts[-1])
    monkeypatch.setattr(Searcher, "try_again", lambda self, starts, least, target, effort: least)


def late_prover(after: Callable[[threading.Event], object]) -> type:
    """A prover that reports a plan, and that it is optimal, once ``after(stopped)`` returns."""
    seconds, plan = plan_within(PROBLEM, BUDGET)

    class Late:
        failures: tuple[str, ...] = ()
        infeasible = False

        def __init__(self, request: Any, structure: Any, budget: int, report: Any, gap: Any):
            self.report, self.stopped = report, threading.Event()

        def run(self) -> None:
            after(self.stopped)
            self.report(seconds, plan)

        def stop(self) -> None:
            self.stopped.set()

    return Late


@pytest.mark.usefixtures("blind")
def test_a_plan_that_arrives_after_the_search_has_ended_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "Prover", late_prover(lambda stopped: stopped.wait()))
    assert solve(PROBLEM, memory_budget=BUDGET, time_limit=0.2).fits


@pytest.mark.usefixtures("blind")
def test_while_nothing_fits_the_search_waits_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, stopped_early = threading.Event(), []

    def try_again(
        self: Searcher, starts: list[Found], least: Found, target: int, effort: Effort
    ) -> Found:
        tried.set()
        return least

    def after(stopped: threading.Event) -> None:
        tried.wait(20.0)
        stopped_early.append(stopped.is_set())

    monkeypatch.setattr(Searcher, "try_again", try_again)
    monkeypatch.setattr(auto, "Prover", late_prover(after))
    found = solve(PROBLEM, memory_budget=BUDGET, time_limit=60.0)
    assert found.status == "optimal"
    assert stopped_early == [False]


def test_before_the_kernels_are_compiled_a_late_plan_is_judged_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = cold.Kernels()
    monkeypatch.setattr(kernels, "wait", lambda seconds: False)
    monkeypatch.setattr(auto, "KERNELS", kernels)
    monkeypatch.setattr(auto, "plans_without_kernels", lambda *arguments: iter(()))
    monkeypatch.setattr(auto, "Prover", late_prover(lambda stopped: stopped.wait()))
    assert solve(PROBLEM, memory_budget=BUDGET, time_limit=0.2).fits


def test_plans_that_fit_are_used_where_there_is_no_effort_to_polish_them() -> None:
    problem = chain([4] * 33, [1.0] * 32)
    keep = solve(problem, memory_budget=None)
    searcher = Searcher(Structure(problem))
    fitting = [plan for plan in searcher.seeds if plan.peak <= keep.peak // 2]
    found = solve(problem, memory_budget=keep.peak // 2, max_evaluations=0)
    assert len(fitting) > 1
    assert found.fits
    assert found.seconds <= min(plan.seconds for plan in fitting)


def test_where_lowering_gives_up_random_tries_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto.Auto, "_first_plans", lambda self, searcher, effort: [])
    monkeypatch.setattr(Searcher, "lower", lambda self, starts, target, effort: starts[-1])
    found = solve(PROBLEM, memory_budget=BUDGET, max_evaluations=3000)
    assert found.fits
    again = solve(PROBLEM, memory_budget=BUDGET, max_evaluations=3000)
    assert again.schedule == found.schedule
