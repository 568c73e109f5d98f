"""The helpers of the simple solvers: lazy replay, the byte profile, cut points."""

from __future__ import annotations

from brute import demanded_at
from hypothesis import given
from hypothesis import strategies as st
from strategies import chain, problems

from remat.solvers.problem import Op, Problem, Value
from remat.solvers.schedule import Schedule
from remat.solvers.segments import (
    NEVER,
    Candidate,
    Crossings,
    Demands,
    profile,
    replay,
    save_all,
)
from remat.solvers.simulate import simulate
from remat.solvers.stages import contract


@st.composite
def plans(draw):
    """A problem, and any retention rule for it."""
    problem = draw(problems())
    held = st.sampled_from((0, 0, 1, 2, 3, NEVER))
    return problem, [draw(held) for _ in problem.values]


@given(plans())
def test_any_retention_rule_is_a_valid_schedule(plan):
    problem, held_from = plan
    computes = replay(problem, held_from)
    timeline = simulate(problem, Schedule.from_computes(problem, computes))
    assert timeline.seconds == sum(problem.ops[index].seconds for index in computes)


@given(plans())
def test_the_profile_is_what_the_judge_counts(problem_and_rule):
    problem, held_from = problem_and_rule
    candidate = Candidate.of(problem, replay(problem, held_from))
    timeline = simulate(problem, candidate.schedule)
    counted = [
        used
        for used, step in zip(timeline.bytes, candidate.schedule.steps, strict=True)
        if step.kind == "compute"
    ]
    assert list(candidate.bytes) == counted
    assert (candidate.peak, candidate.seconds) == (timeline.peak, timeline.seconds)


@given(problems(drops=False))
def test_save_all_runs_what_is_demanded_once(problem):
    never = len(problem.backward)
    demanded = {index for index, at in demanded_at(problem).items() if at <= never}
    computes = save_all(problem).computes
    assert len(set(computes)) == len(computes)
    assert set(computes) == {*problem.forward, *problem.backward, *demanded}


@given(problems())
def test_a_demand_is_the_first_position_that_cannot_do_without(problem):
    demands = Demands.of(problem)
    at = demanded_at(problem)
    for v in range(len(problem.values)):
        readers = [p for p, b in enumerate(problem.backward) if v in problem.ops[b].reads]
        for index in problem.deferred:
            if v in problem.ops[index].reads and at[index] <= len(problem.backward):
                readers.append(at[index])
        if problem.producer[v] in problem.deferred and problem.values[v].output:
            readers.append(len(problem.backward))
        assert demands.first[v] == min(readers, default=NEVER)


def _names(problem, computes):
    return " ".join(problem.ops[index].name for index in computes)


def test_a_dropped_value_is_recomputed_for_each_reader_or_held():
    problem = chain([1, 1, 1, 1], [1.0, 1.0, 1.0], reads_output=True)
    x1, x2 = 1, 2
    never_held = [NEVER if v in (x1, x2) else 0 for v in range(len(problem.values))]
    assert _names(problem, replay(problem, never_held)) == "f1 f2 f3 f1 f2 b3 f1 f2 b2 f1 b1"
    held = [1 if v in (x1, x2) else 0 for v in range(len(problem.values))]
    assert _names(problem, replay(problem, held)) == "f1 f2 f3 f1 f2 b3 b2 b1"


def test_recompute_at_brings_values_in_early():
    problem = chain([1, 1, 1, 1], [1.0, 1.0, 1.0])
    x1 = 1
    rule = [1 if v == x1 else 0 for v in range(len(problem.values))]
    assert _names(problem, replay(problem, rule, {0: [x1]})) == "f1 f2 f3 f1 b3 b2 b1"
    assert _names(problem, replay(problem, rule)) == "f1 f2 f3 b3 f1 b2 b1"


def test_crossings_leave_out_what_is_over():
    problem = chain([1, 2, 4, 8], [1.0, 1.0, 1.0])
    crossings = Crossings.of(problem)
    assert [crossings.at(position) for position in range(3)] == [[1], [2], []]
    assert crossings.bytes == (2, 4, 0)


def _residual_block(with_mask: bool) -> Problem:
    """x -> (cast w) -> a -> b; x + b = y; twice, with a mask that both blocks read or without."""
    names = ["p", "w", "mask", "x", "c0", "a0", "b0", "y", "c1", "a1", "b1", "z", "stat"]
    values = tuple(Value(name, 1, owned=name in "pw") for name in names)
    v = {name: i for i, name in enumerate(names)}
    rows = [("embed", "p", "x"), ("mask", "p", "mask")]
    for k, (source, sink) in enumerate((("x", "y"), ("y", "z"))):
        rows += [(f"cast{k}", "w", f"c{k}"), (f"mm{k}", f"{source} c{k}", f"a{k}")]
        rows += [(f"attn{k}", f"a{k} mask" if with_mask else f"a{k}", f"b{k}")]
        rows += [(f"add{k}", f"{source} b{k}", sink)]
    rows.append(("statistic", "y", "stat"))
    ops = tuple(
        Op(name, "forward", tuple(v[r] for r in reads.split()), (v[writes],))
        for name, reads, writes in rows
    )
    return Problem(values, ops)


def test_residual_blocks_are_cut_between_the_blocks():
    problem = _residual_block(with_mask=False)
    stages = contract(problem)
    assert [problem.values[v].name for v in stages.cuts] == ["x", "y"]
    by_name = [[problem.ops[i].name for i in ops] for ops in stages.ops]
    assert by_name == [
        ["embed"],
        ["cast0", "mm0", "attn0", "add0"],
        ["cast1", "mm1", "attn1", "add1", "statistic"],
    ]


def test_a_shared_mask_hides_the_cuts_until_it_is_removed():
    problem = _residual_block(with_mask=True)
    assert [problem.values[v].name for v in contract(problem).cuts] == ["x"]
    mask = next(i for i, value in enumerate(problem.values) if value.name == "mask")
    stages = contract(problem, {mask})
    assert [problem.values[v].name for v in stages.cuts] == ["x", "y"]
    outside = set(problem.forward) - {i for ops in stages.ops for i in ops}
    assert [problem.ops[i].name for i in outside] == ["mask"]


@given(problems(max_forward=7))
def test_stages_only_meet_at_the_cuts(problem):
    stages = contract(problem)
    stage_of = {index: k for k, ops in enumerate(stages.ops) for index in ops}
    for index, stage in stage_of.items():
        for v in problem.ops[index].reads:
            maker = problem.producer[v]
            if problem.values[v].owned or stage_of.get(maker) == stage:
                continue
            assert v in stages.cuts
            assert (stage_of[maker], stage) == (stages.cuts.index(v), stages.cuts.index(v) + 1)


@given(problems())
def test_profile_of_nothing_is_empty(problem):
    assert profile(problem, []) == []
