"""A plan's figures, worked out by hand (see conftest), and what happens to a stored one."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat.plans import DecisionRow, LayerRow, Plan, Unplanned, op_at
from remat.solvers.errors import PlanMismatch
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule


def test_figures(plan: Plan) -> None:
    assert (plan.peak, plan.baseline_peak, plan.least_peak) == (1408, 1508, 1408)
    assert plan.extra_time == pytest.approx(11 / 10 - 1)
    assert plan.extra_flops == pytest.approx(102 / 92 - 1)
    assert plan.gap == pytest.approx((11 - 10.45) / 11)


def test_decisions(plan: Plan) -> None:
    assert plan.decisions == {
        "a": DecisionRow("a", "recompute", 100, "blocks.0", "m.py:10", 1.0),
        "b": DecisionRow("b", "keep", 200, "blocks.1", "m.py:11", 0.0),
    }


def test_by_layer(plan: Plan) -> None:
    assert plan.by_layer() == (
        LayerRow("blocks.0", 100, 0, 100, 0, 1.0),
        LayerRow("blocks.1", 200, 200, 0, 0, 0.0),
    )


def test_phases(plan: Plan) -> None:
    forward, backward = plan.phases
    assert (forward.baseline_seconds, forward.seconds) == (3.5, 3.5)
    assert (backward.baseline_seconds, backward.seconds) == (6.5, 7.5)
    assert (forward.baseline_flops, backward.baseline_flops, backward.flops) == (31, 61, 71)
    assert (forward.baseline_peak, forward.peak) == (1304, 1300)
    assert (backward.baseline_peak, backward.peak) == (1508, 1408)


def test_the_baseline_itself_costs_nothing_extra(plan: Plan) -> None:
    same = dataclasses.replace(
        plan,
        solution=dataclasses.replace(
            plan.solution, schedule=plan.baseline, timeline=plan.baseline_timeline
        ),
    )
    assert (same.extra_time, same.extra_flops, same.peak) == (0.0, 0.0, same.baseline_peak)
    assert {row.action for row in same.decisions.values()} == {"keep"}


def test_a_step_without_seconds_has_no_extra_time(plan: Plan) -> None:
    free = dataclasses.replace(
        plan.problem,
        ops=tuple(dataclasses.replace(op, seconds=0.0, flops=0) for op in plan.problem.ops),
    )
    timeline = dataclasses.replace(plan.solution.timeline, seconds=0.0, flops=0)
    still = dataclasses.replace(
        plan, problem=free, solution=dataclasses.replace(plan.solution, timeline=timeline)
    )
    assert (still.extra_time, still.extra_flops) == (0.0, 0.0)


def test_the_op_at_a_step(problem: Problem, plan: Plan) -> None:
    timeline = plan.solution.timeline
    at_peak = op_at(problem, plan.solution.schedule, timeline.peak_step)
    assert at_peak is not None
    assert at_peak.name == "b_loss"
    frees = [i for i, step in enumerate(plan.baseline.steps) if step.kind == "free"]
    before = op_at(problem, plan.baseline, frees[-1])
    assert before is not None
    assert before.name == "b_a"
    assert op_at(problem, Schedule(()), -1) is None


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_stored_plan_is_the_same_plan(plan: Plan, tmp_path: Path, name: str) -> None:
    plan.save(tmp_path / name)
    loaded = Plan.load(tmp_path / name)
    assert loaded == plan
    assert str(loaded) == str(plan)
    loaded.save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_bytes_are_simulated_again_not_stored(plan: Plan) -> None:
    stored = plan.to_json()["solution"]
    assert "bytes" not in stored
    assert "timeline" not in stored


def test_an_infinite_bound_is_stored(plan: Plan, tmp_path: Path) -> None:
    """Where nothing fits, no time is too long to be a bound; JSON has no infinity."""
    endless = dataclasses.replace(plan.solution, lower_bound=math.inf, status="infeasible")
    dataclasses.replace(plan, solution=endless).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").solution.lower_bound == math.inf


def test_a_plan_can_be_pickled(plan: Plan) -> None:
    """It is sent from rank to rank."""
    assert pickle.loads(pickle.dumps(plan)) == plan


def _change(path: list[str], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_change(["format"], "remat.plan/2"), "format is 'remat.plan/2', .* reads 'remat.plan/1'"),
        (_change(["solution", "peak"], 1), "stored peak is 1 bytes, but its steps peak at 1408"),
        (_change(["problem", "fixed_bytes"], 0), "the solution belongs to another problem"),
        (_change(["solution", "steps"], [["compute", 1]]), "cannot run: step 0: forward op 'f_b'"),
        (_change(["solution", "steps"], [["compute", 99]]), "compute of index 99; there are 6"),
        (_change(["solution", "steps"], [["compute", -1]]), r"unknown step \['compute', -1\]"),
        (_change(["solution", "steps"], [["__init__", 0]]), r"unknown step \['__init__', 0\]"),
        (_change(["baseline"], [["compute", 0]]), "cannot run: .*'f_b' never runs"),
        (_change(["problem", "ops"], []), "the stored plan cannot run: nobody writes the output"),
        (lambda data: data.pop("least_peak"), "malformed plan: KeyError 'least_peak'"),
        (lambda data: data.pop("solution"), "malformed plan: KeyError 'solution'"),
        (_change(["device"], None), "malformed plan: TypeError device is None, which is no text"),
        (_change(["least_peak"], "9"), "least_peak is '9', which is no number of bytes"),
        (_change(["replayed_peak"], 1.5), "replayed_peak is 1.5, which is no number of bytes"),
        (_change(["solution", "status"], "good"), "the status 'good' is none of optimal, feasible"),
        (_change(["solution"], 7), "malformed plan: TypeError"),
        (_change(["solution", "solve_time"], "x"), "solve_time is 'x', which is no number of sec"),
        (_change(["solution", "lower_bound"], "x"), "lower_bound is 'x', which is no number of s"),
    ],
)
def test_an_edited_plan_is_refused(
    plan: Plan, tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    data = plan.to_json()
    edit(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanMismatch, match=message) as refused:
        Plan.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"not json", b"\xff\xfe", b"[1]", b"\x1f\x8bbroken"])
def test_what_is_no_plan_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(PlanMismatch, match=r"no stored plan|format is 'list'"):
        Plan.load(path)


def test_a_damaged_archive_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json.gz"
    plan.save(path)
    raw = bytearray(path.read_bytes())
    raw[20] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(PlanMismatch, match="no stored plan"):
        Plan.load(path)


def test_a_plan_for_another_graph_is_refused(plan: Plan) -> None:
    plan.check(plan.graph_hash, "2.13.0")
    with pytest.raises(PlanMismatch, match=r"another graph: .* 0123.*is feed.*remat\.plan"):
        plan.check("feed", plan.torch_version)


def test_a_plan_of_another_torch_is_refused(plan: Plan) -> None:
    plan.check(plan.graph_hash, "2.13.0+cu130")
    with pytest.raises(PlanMismatch, match=r"under torch 2\.13\.0\+cpu, this is torch 2\.14\.0"):
        plan.check(plan.graph_hash, "2.14.0")


def test_an_unplanned_graph_is_one_line() -> None:
    assert str(Unplanned("nothing in it requires grad")) == (
        "not planned: nothing in it requires grad"
    )
    assert str(Unplanned("nothing trains", "m.py:3")) == "not planned: nothing trains (m.py:3)"


def test_repr_is_short(plan: Plan) -> None:
    assert repr(plan) == "<Plan 0123456789ab budget 1.42 KiB peak 1.38 KiB extra time 10.0%>"
