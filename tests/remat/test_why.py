"""What one other decision would do, and the sentence that explains the one there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.joined import join
from remat.passes.choices import constrain
from remat.plans import IN_STEP, Plan
from remat.report.changes import NOT_KEEPABLE, OUTPUT, RUNS_ONCE, change
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Decision, Schedule, Step, decisions, with_frees
from remat.solvers.simulate import simulate
from remat.solvers.units import format_bytes
from remat.step_plan import StepPlan
from tests.remat.conftest import BASELINE, PROBLEM, RECOMPUTES_A
from tests.remat.random_plans import nested_plan

SEEDS = st.integers(0, 10_000)


def test_a_kept_value_recomputed() -> None:
    """The baseline with ``a`` recomputed is the schedule that was worked out by hand."""
    changed = change(PROBLEM, BASELINE, 1, Decision.KEEP)
    assert changed.decision is Decision.RECOMPUTE
    assert changed.timeline == simulate(PROBLEM, RECOMPUTES_A)


def test_a_recomputed_value_kept() -> None:
    changed = change(PROBLEM, RECOMPUTES_A, 1, Decision.RECOMPUTE)
    assert changed.decision is Decision.KEEP
    assert changed.timeline == simulate(PROBLEM, BASELINE)


def test_what_it_is_made_from_is_made_again_too() -> None:
    """``b`` reads ``a``, which is not there in this plan when ``b`` is first read."""
    changed = change(PROBLEM, RECOMPUTES_A, 2, Decision.KEEP)
    # f_a and f_b before b_loss, and f_a once more where it was.
    assert changed.timeline is not None
    assert changed.timeline.seconds == simulate(PROBLEM, RECOMPUTES_A).seconds + 1.0 + 2.0


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_frees_are_those_of_a_schedule_of_ops(seed: int) -> None:
    plan = nested_plan(seed)
    schedule = plan.solution.schedule
    assert with_frees(plan.problem, [s for s in schedule.steps if s.kind == "compute"]) == schedule


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_every_change_runs_and_is_what_it_says(seed: int) -> None:
    plan = nested_plan(seed, length=10)
    now = plan.solution.timeline
    for value, decision in decisions(plan.problem, plan.solution.schedule).items():
        changed = change(plan.problem, plan.solution.schedule, value, decision)
        if changed.timeline is None:
            assert changed.refused in (RUNS_ONCE, OUTPUT)
        elif decision is Decision.RECOMPUTE:
            assert changed.timeline.seconds < now.seconds
        else:
            assert changed.timeline.seconds > now.seconds


def test_what_cannot_be_changed_says_why() -> None:
    once = _with_op(PROBLEM, 0, rerunnable=False)
    assert change(once, BASELINE, 1, Decision.KEEP).refused == RUNS_ONCE
    assert change(PROBLEM, BASELINE, 3, Decision.KEEP).refused == OUTPUT
    values = list(PROBLEM.values)
    values[1] = dataclasses.replace(values[1], keepable=False)
    dropped = dataclasses.replace(PROBLEM, values=tuple(values))
    assert change(dropped, RECOMPUTES_A, 1, Decision.RECOMPUTE).refused == NOT_KEEPABLE


def _with_op(problem: Problem, index: int, **fields: object) -> Problem:
    ops = list(problem.ops)
    ops[index] = dataclasses.replace(ops[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(problem, ops=tuple(ops))


def _offloading() -> Schedule:
    """The baseline with ``a`` away while the loss is made: events, then their frees."""
    events = [Step("compute", op) for op in BASELINE.computes]
    events[2:2] = [Step("offload", 1), Step("wait", 1)]
    events[6:6] = [Step("reload", 1), Step("wait", 1)]
    return with_frees(PROBLEM, events)


def test_an_offloaded_value_kept() -> None:
    link = Link(50.0, 50.0)
    schedule = _offloading()
    assert simulate(PROBLEM, schedule, link).seconds == 14.0, "100 bytes away and back: 4 seconds"
    changed = change(PROBLEM, schedule, 1, Decision.OFFLOAD, link)
    assert changed.timeline == simulate(PROBLEM, BASELINE)


def test_a_change_that_a_transfer_stands_in_the_way_of() -> None:
    """``b`` cannot be made again from ``a`` before ``a`` is back: it would come back twice."""
    changed = change(PROBLEM, _offloading(), 2, Decision.KEEP, Link(50.0, 50.0))
    assert changed.timeline is not None, "a is made again for b, and freed before it is reloaded"
    in_flight = [s for s in _offloading().steps if s != Step("wait", 1)]
    broken = change(PROBLEM, Schedule(tuple(in_flight)), 2, Decision.KEEP, Link(50.0, 50.0))
    assert broken.timeline is None
    assert broken.refused.startswith("the rest of the schedule does not allow it (step ")


def test_why_a_value_is_recomputed(plan: Plan) -> None:
    assert plan.why("a") == (
        "a (100 B, blocks.0, m.py:10) is recomputed: mm runs again, which takes 1.00 s (10.00 % of "
        "the step), and its 100 B need not wait for backward. Kept, it would save 1.00 s, and the "
        "peak would be 1.47 KiB, 58 B over the budget."
    )


def test_why_a_value_is_kept(plan: Plan) -> None:
    """3 s for 196 bytes; the plan paid 1 s for 100."""
    assert plan.why("b") == (
        "b (200 B, blocks.1, m.py:11) is kept: to recompute it would take 3.00 s more and would "
        "not lower the peak."
    )


def test_why_a_value_is_offloaded(plan: Plan) -> None:
    link, schedule = Link(50.0, 50.0), _offloading()
    timeline = simulate(PROBLEM, schedule, link)
    solution = dataclasses.replace(plan.solution, schedule=schedule, timeline=timeline)
    away = dataclasses.replace(plan, solution=solution, link=link, offload="host")
    assert away.why("a") == (
        "a (100 B, blocks.0, m.py:10) is offloaded: its bytes wait for backward elsewhere (host). "
        "Kept, it would save 4.00 s, and the peak would be 1.47 KiB, 58 B over the budget."
    )


def _sentences(seeds: int) -> Iterator[str]:
    for seed in range(seeds):
        plan = nested_plan(seed, length=10)
        yield from map(plan.why, plan.decisions)


@pytest.mark.parametrize(
    "words",
    [
        " a MiB, where the plan pays ",
        " a MiB, no more than the plan pays on average, but the budget is met.",
        "is kept: its op may run only once.",
        "would not lower the peak, where it is not alive.",
        ", still within the budget: the solver left this, within its gap of ",
        " times more, which takes ",
    ],
)
def test_every_reason_is_given_somewhere(words: str) -> None:
    assert any(words in sentence for sentence in _sentences(60)), words


def test_without_a_budget_it_says_so(plan: Plan) -> None:
    unasked = dataclasses.replace(
        plan,
        memory_budget=None,
        solution=dataclasses.replace(
            plan.solution,
            schedule=plan.baseline,
            timeline=plan.baseline_timeline,
            memory_budget=None,
            solver="baseline",
        ),
    )
    assert unasked.why("a") == (
        "a (100 B, blocks.0, m.py:10) is kept: no budget was asked for; to recompute it would take "
        "1.00 s more and lower the peak by 100 B."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", "is resident: the caller owns it"),
        ("t", "arrives with backward"),
        ("loss", "is returned by forward"),
        ("grad_a", "is made in backward"),
    ],
)
def test_values_without_a_decision(plan: Plan, value: str, words: str) -> None:
    assert words in plan.why(value)


def test_an_unknown_value_is_refused_with_the_nearest(plan: Plan) -> None:
    with pytest.raises(InvalidOption, match="no value 'grad_c'; near it are grad_x, grad_b"):
        plan.why("grad_c")
    with pytest.raises(InvalidOption, match=r"plan\.decisions has the names"):
        plan.why("?")


def test_a_whole_step_is_judged_as_a_whole(step_plan: StepPlan) -> None:
    """Its first call recomputes ``a``, its second keeps it."""
    assert set(step_plan.decisions) == {"0: a", "0: b", "1: a", "1: b"}
    problem, schedule = step_plan.problem, step_plan.solution.schedule
    names = [held.name for held in problem.values]
    for name, row in step_plan.decisions.items():
        changed = change(problem, schedule, names.index(name), Decision(row.action))
        assert changed.timeline is not None
        text = step_plan.why(name)
        if row.action == "recompute":
            assert f"the peak would be {format_bytes(changed.timeline.peak)}" in text
            assert ("over the budget" in text) == (changed.timeline.peak > 5000)
        else:
            change_of_peak = changed.timeline.peak - step_plan.peak
            said = format_bytes(abs(change_of_peak)) if change_of_peak else "not lower the peak"
            assert said in text
    assert step_plan.why("0: a").startswith("0: a (100 B, call.0.blocks.0, m.py:10) is recomputed")


def test_what_the_user_keeps_is_said_to_be_kept_by_him(plan: Plan, step_plan: StepPlan) -> None:
    problem = constrain(plan.problem, keep=("blocks.1",))
    schedule = plan.solution.schedule
    mine = dataclasses.replace(plan, problem=problem, keep=("blocks.1",))
    assert mine.why("b").endswith("is kept: keep='blocks.1' says that its op runs once.")
    joined = join([dataclasses.replace(problem, fixed_bytes=0)] * 2, step_plan.joined.phases, 1000)
    both = joined.schedule([schedule, plan.baseline])
    solution = dataclasses.replace(
        step_plan.solution, schedule=both, timeline=simulate(joined.problem, both)
    )
    whole = dataclasses.replace(step_plan, plans=(mine, mine), joined=joined, solution=solution)
    assert whole.why("1: b").endswith("is kept: keep='blocks.1' says that its op runs once.")
    assert "may run only once" not in whole.why("1: a")


def test_a_name_without_its_call(step_plan: StepPlan, plan: Plan) -> None:
    with pytest.raises(InvalidOption, match=r"no value 'a'; near it are 0: a, 1: a"):
        step_plan.why("a")
    with pytest.raises(InvalidOption, match=r"value is 5, not the name"):
        plan.why(5)  # type: ignore[arg-type]


def test_one_graph_of_a_step_says_nothing_of_peaks(plan: Plan) -> None:
    """What is alive beside it differs from phase to phase."""
    alone = plan.why("a")
    part = dataclasses.replace(plan, notes=(f"{IN_STEP} call 1 of 2 in one that peaks at 5 B",))
    assert "peak" in alone
    assert part.in_step
    assert part.why("a") == (
        "a (100 B, blocks.0, m.py:10) is recomputed: it was decided for the whole step, and what "
        "else is alive then is known there; ask the plan of the step (step_plan.why, with a name "
        "of step_plan.decisions)."
    )
    assert "beside     1000 B of that: what else is alive" in str(part)
    assert "resident" not in str(part).split("\n\n")[0]
