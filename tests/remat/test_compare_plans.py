"""Two plans side by side: each cause is named, with both sides of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.cli import DONE, FAILED, main
from remat.comparison import Cause, LayerChange, Redecided, compare
from remat.plans import Plan
from remat.solvers.problem import Link, Op, Problem
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate

Captured = pytest.CaptureFixture[str]


def solved(plan: Plan, problem: Problem, schedule: Schedule) -> Plan:
    solution = dataclasses.replace(
        plan.solution,
        problem_key=problem.key,
        schedule=schedule,
        timeline=simulate(problem, schedule),
    )
    return dataclasses.replace(plan, problem=problem, solution=solution)


@pytest.fixture
def kept(plan: Plan) -> Plan:
    """The plan that keeps everything."""
    return solved(plan, plan.problem, plan.baseline)


def test_the_same_plans(plan: Plan) -> None:
    found = compare(plan, plan)
    assert found.same
    assert (found.causes, found.redecided, found.layers) == ((), (), ())
    assert str(found).startswith("the plans are the same\n")


def test_what_changed(plan: Plan, kept: Plan) -> None:
    found = compare(kept, plan)
    assert found.redecided == (Redecided("a", "keep", "recompute", 100, "blocks.0", "m.py:10"),)
    assert found.layers == (LayerChange("blocks.0", 100, 0, 0.0, 1.0),)
    text = str(found)
    assert "keep → recompute       100 B  a blocks.0 m.py:10" in text
    assert "peak                  1.47 KiB      1.38 KiB      -6.6 %" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_another_plan_for_the_same_question(plan: Plan, kept: Plan) -> None:
    assert compare(kept, plan).causes == ()
    assert "the solver stopped at another plan" in str(compare(kept, plan))


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"memory_budget": None}, Cause("budget", "1.42 KiB → none")),
        ({"memory_budget": 1451}, Cause("budget", "1450 bytes → 1451 bytes")),
        ({"torch_version": "2.14.0"}, Cause("torch", "2.13.0+cpu → 2.14.0")),
        ({"device": "h100"}, Cause("device", "cpu → h100")),
        ({"executor": "inductor"}, Cause("executor", "eager → inductor")),
        ({"remat_version": "9"}, Cause("remat", "0.1.0 → 9")),
        ({"keep": ("h.*",)}, Cause("patterns", "none → keep h.*")),
        (
            {"offload": "host", "link": Link(2**34, 2**33)},
            Cause("offload", "none → host at 16.0 GiB/s there and 8.00 GiB/s back"),
        ),
    ],
)
def test_why(plan: Plan, changed: dict[str, Any], cause: Cause) -> None:
    found = compare(plan, dataclasses.replace(plan, **changed))
    assert found.causes == (cause,)
    assert f"{cause.subject:<11}{cause.text}" in str(found)


def test_more_is_resident(plan: Plan) -> None:
    more = solved(plan, dataclasses.replace(plan.problem, fixed_bytes=3000), plan.baseline)
    assert compare(plan, more).causes == (
        Cause("resident", "1000 B → 2.93 KiB: parameters, inputs, state"),
    )


def test_costs_were_measured_again(plan: Plan) -> None:
    ops = tuple(dataclasses.replace(op, seconds=2 * op.seconds) for op in plan.problem.ops)
    again = solved(plan, dataclasses.replace(plan.problem, ops=ops), plan.solution.schedule)
    (cause,) = compare(plan, again).causes
    assert cause == Cause("costs", "measured again: 10.00 s → 20.00 s for every op once")
    roofline = solved(
        plan, dataclasses.replace(plan.problem, ops=ops, cost="roofline"), plan.baseline
    )
    assert "unknown → roofline: 10.00 s → 20.00 s" in compare(plan, roofline).causes[0].text


def with_code(plan: Plan, ops: tuple[Op, ...], **problem: Any) -> Plan:
    changed = dataclasses.replace(plan.problem, ops=ops, **problem)
    return dataclasses.replace(solved(plan, changed, plan.baseline), graph_hash="f" * 64)


def test_the_code_changed(plan: Plan, kept: Plan) -> None:
    ops = tuple(
        dataclasses.replace(op, target="aten.gelu", name=f"{op.name}_x")
        if op.target == "mm"
        else op
        for op in plan.problem.ops
    )
    found = compare(kept, with_code(kept, ops))
    assert found.causes == (
        Cause("code", "4 ops gone (4 mm in blocks.0 and others), "
                      "4 ops new (4 aten.gelu in blocks.0 and others)"),
    )  # fmt: skip


def test_only_the_sizes_changed(plan: Plan) -> None:
    values = tuple(dataclasses.replace(v, bytes=2 * v.bytes) for v in plan.problem.values)
    found = compare(plan, with_code(plan, plan.problem.ops, values=values))
    assert (
        found.causes[0].text == "the same ops over tensors of other sizes: 628 B → 1.23 KiB in all"
    )
    # Values of other code are matched by their place: what was computed again is kept there.
    assert [(row.value, row.after) for row in found.redecided] == [("a", "keep")]


def test_a_renamed_value_is_still_the_same(plan: Plan) -> None:
    values = tuple(
        dataclasses.replace(v, name={"a": "gelu_17"}.get(v.name, v.name))
        for v in plan.problem.values
    )
    found = compare(plan, with_code(plan, plan.problem.ops, values=values))
    assert [(row.value, row.before, row.after) for row in found.redecided] == [
        ("gelu_17", "recompute", "keep")
    ]


def test_steps_are_compared_too(plan: Plan, kept: Plan) -> None:
    from remat.joined import Phase, join
    from remat.step_plan import StepPlan

    problem = dataclasses.replace(plan.problem, fixed_bytes=0)
    joined = join([problem], [Phase("forward", 0, 0), Phase("backward", 0, 8)], 1000)

    def step(called: Plan) -> StepPlan:
        schedule = joined.schedule([called.solution.schedule])
        solution = dataclasses.replace(
            plan.solution,
            problem_key=joined.problem.key,
            schedule=schedule,
            timeline=simulate(joined.problem, schedule),
        )
        baseline = joined.schedule([plan.baseline])
        return StepPlan(2000, (called,), joined, solution, baseline)

    found = compare(step(kept), step(plan))
    assert [(row.value, row.after) for row in found.redecided] == [("0: a", "recompute")]
    causes = compare(plan, step(plan)).causes
    assert causes[0] == Cause("kind", "one graph → a step of 1 graph call")
    assert "costs" not in [cause.subject for cause in causes]  # the ops are the same
    assert "peak" in str(found)
    empty = join([], [], 1000)
    nothing = dataclasses.replace(
        plan.solution, schedule=Schedule(()), timeline=simulate(empty.problem, Schedule(()))
    )
    assert "peak" in str(compare(plan, StepPlan(2000, (), empty, nothing, Schedule(()))))


def test_the_command(plan: Plan, kept: Plan, tmp_path: Path, capsys: Captured) -> None:
    plan.save(tmp_path / "a.json")
    kept.save(tmp_path / "b.json.gz")
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json.gz")]) == DONE
    assert capsys.readouterr().out == f"{remat.compare(plan, kept)}\n"
    assert main(["compare", str(tmp_path / "a.json"), "gone.json"]) == FAILED
    assert "cannot read gone.json" in capsys.readouterr().err
