"""The compiled evaluator equals the judge."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

from remat.solvers.anneal import fill, new_memory, repair
from remat.solvers.evaluate import (
    LENGTH,
    PEAK,
    Sequence,
    analyse,
    arrays_of,
    load,
    new_sequence,
)
from remat.solvers.moves import new_scratch
from remat.solvers.problem import Problem
from remat.solvers.retention import computes_from_retention
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate

BIG = problems(max_forward=8, max_deferred=3, max_backward=7)


def draw_computes(data: st.DataObject, problem: Problem) -> list[int]:
    """The ops of a random retention map."""
    groups = max(1, len(problem.backward))
    kept = [
        data.draw(st.sets(st.integers(0, max(0, len(problem.values) - 1)))) for _ in range(groups)
    ]
    return computes_from_retention(problem, kept, range(len(problem.backward)))


def loaded(problem: Problem, computes: list[int]) -> Sequence:
    arrays = arrays_of(problem)
    sequence = new_sequence(arrays)
    assert load(arrays, sequence, np.array(computes, dtype=np.int64), len(computes))
    return sequence


def runs(sequence: Sequence) -> list[int]:
    return [int(op) for op in sequence.ops[: sequence.facts[LENGTH]]]


@settings(max_examples=80, deadline=None)
@given(BIG, st.data())
def test_bytes_and_seconds_equal_the_judges(problem: Problem, data: st.DataObject) -> None:
    sequence = loaded(problem, draw_computes(data, problem))
    schedule = Schedule.from_computes(problem, runs(sequence))
    timeline = simulate(problem, schedule)
    computed = [
        used
        for step, used in zip(schedule.steps, timeline.bytes, strict=True)
        if step.kind == "compute"
    ]
    assert list(sequence.used[: sequence.facts[LENGTH]]) == computed
    assert sequence.facts[PEAK] == timeline.peak
    assert sequence.seconds[0] == timeline.seconds


@settings(max_examples=100, deadline=None)
@given(BIG, st.data())
def test_only_useless_recomputations_are_dropped(problem: Problem, data: st.DataObject) -> None:
    computes = draw_computes(data, problem)
    before = simulate(problem, Schedule.from_computes(problem, computes))
    sequence = loaded(problem, computes)
    after = simulate(problem, Schedule.from_computes(problem, runs(sequence)))
    assert after.seconds <= before.seconds
    assert after.peak <= before.peak
    assert set(runs(sequence)) == set(computes)


@settings(max_examples=100, deadline=None)
@given(BIG, st.data(), st.integers(0, 60), st.integers(0, 5))
def test_repair_and_fill_keep_their_promise(
    problem: Problem, data: st.DataObject, budget: int, seed: int
) -> None:
    arrays, sequence = arrays_of(problem), loaded(problem, draw_computes(data, problem))
    scratch, memory = new_scratch(arrays, sequence), new_memory(arrays, sequence, seed)
    mended = repair(arrays, sequence, scratch, memory, budget, 30, 20, math.inf, 0.0)
    timeline = simulate(problem, Schedule.from_computes(problem, runs(sequence)))
    assert mended == (timeline.peak <= budget)
    fill(arrays, sequence, scratch, memory, budget, 1000)
    filled = simulate(problem, Schedule.from_computes(problem, runs(sequence)))
    assert filled.seconds <= timeline.seconds
    assert filled.peak <= max(budget, timeline.peak)


def test_a_second_instance_of_an_output_counts_beside_the_first() -> None:
    from remat.solvers.problem import Op, Value

    problem = Problem(
        (Value("out", 10, output="forward"), Value("x", 3), Value("t", 1, tangent=True)),
        (
            Op("f", "forward", (), (0, 1), seconds=1.0),
            Op("b0", "backward", (2,), (), seconds=1.0),
            Op("b1", "backward", (1,), (), seconds=1.0),
        ),
    )
    sequence = loaded(problem, [0, 1, 0, 2])
    assert list(sequence.used[:4]) == [13, 11, 23, 13]


def test_analysing_twice_changes_nothing() -> None:
    from strategies import chain

    problem = chain([4] * 6, [1.0] * 5)
    arrays, sequence = arrays_of(problem), loaded(problem, list(range(10)))
    before = sequence.facts.copy(), sequence.used[:10].copy()
    analyse(arrays, sequence)
    assert (sequence.facts == before[0]).all()
    assert (sequence.used[:10] == before[1]).all()
