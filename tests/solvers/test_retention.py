"""Every retention map is a valid plan."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.keep import keep_everything
from remat.solvers.problem import Problem
from remat.solvers.retention import saved_by_default, schedule_from_retention
from remat.solvers.search import Searcher
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

BIG = problems(max_forward=8, max_deferred=3, max_backward=7)


@settings(max_examples=80, deadline=None)
@given(BIG, st.data())
def test_any_map_is_accepted_by_the_judge(problem: Problem, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    values = st.integers(0, max(0, len(problem.values) - 1))
    kept = [data.draw(st.sets(values)) for _ in range(count)]
    group_of = sorted(data.draw(st.integers(0, count - 1)) for _ in problem.backward)
    timeline = simulate(problem, schedule_from_retention(problem, kept, group_of))
    assert timeline.seconds >= Structure(problem).required_seconds - 1e-9


@settings(max_examples=80, deadline=None)
@given(problems(max_forward=8, max_deferred=3, max_backward=7, drops=False))
def test_keeping_everything_runs_nothing_twice(problem: Problem) -> None:
    schedule = keep_everything(problem)
    assert len(set(schedule.computes)) == len(schedule.computes)
    assert simulate(problem, schedule).seconds == Structure(problem).required_seconds


def test_what_is_not_kept_is_computed_again_from_what_is() -> None:
    problem = chain([1] * 5, [1.0] * 4)
    structure = Structure(problem)
    saved = saved_by_default(problem, structure)
    assert saved == {1, 2, 3}
    schedule = schedule_from_retention(problem, [{2}])
    assert schedule.computes == (0, 1, 2, 3, 2, 4, 5, 0, 6, 7)


@settings(max_examples=30, deadline=None)
@given(problems(max_forward=8, max_backward=7))
def test_nested_segments_are_schedules(problem: Problem) -> None:
    searcher = Searcher(Structure(problem))
    for plan in searcher.seeds:
        timeline = simulate(problem, searcher.schedule(plan))
        assert timeline.peak == plan.peak
        assert timeline.seconds == plan.seconds


def test_nested_segments_of_a_long_chain_trade_time_for_memory() -> None:
    problem = chain([8] * 65, [1.0] * 64)
    seeds = Searcher(Structure(problem)).seeds
    keep = simulate(problem, keep_everything(problem)).peak
    assert seeds[0].peak < keep / 4
    assert min(seed.seconds for seed in seeds) <= 64 * 3 + 64
    peaks = np.array([seed.peak for seed in seeds])
    assert (np.diff(peaks) > 0).all()
