"""The plan of a whole step as a file: canonical JSON, format ``remat.step/1``.

It holds the plans of its calls, one that is called twice once, and what joins them: the phases, the
bytes alive beside the graphs, the schedule of the whole. The joined problem follows from these and
is made again when the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from remat.joined import Phase, join
from remat.plan_json import (
    check_size,
    plan_from_json,
    plan_to_json,
    read_stored,
    refusing_malformed,
    solution_from_json,
    solution_to_json,
    steps_from_json,
    steps_to_json,
    write_json,
)
from remat.plans import Plan
from remat.solvers.errors import PlanMismatch
from remat.solvers.simulate import simulate
from remat.step_plan import StepPlan

STEP_FORMAT: Final = "remat.step/1"

_KINDS: Final = ("forward", "backward", "eager")


def save_step_plan(plan: StepPlan, path: str | Path) -> None:
    """What :meth:`StepPlan.save` does."""
    write_json(path, step_plan_to_json(plan))


def load_step_plan(path: str | Path) -> StepPlan:
    """What :meth:`StepPlan.load` does."""
    return read_stored(path, step_plan_from_json)


def step_plan_to_json(plan: StepPlan) -> dict[str, Any]:
    """What :meth:`StepPlan.to_json` does."""
    unique: list[Plan] = []
    calls = []
    for called in plan.plans:
        if called not in unique:
            unique.append(called)
        calls.append(unique.index(called))
    return {
        "format": STEP_FORMAT,
        "memory_budget": plan.memory_budget,
        "least_peak": plan.least_peak,
        "resident": plan.joined.problem.fixed_bytes,
        "plans": [plan_to_json(each) for each in unique],
        "calls": calls,
        "phases": [
            {"kind": phase.kind, "call": phase.call, "beside": phase.beside}
            for phase in plan.joined.phases
        ],
        "solution": solution_to_json(plan.solution),
        "baseline": steps_to_json(plan.baseline),
    }


def step_plan_from_json(data: Mapping[str, Any]) -> StepPlan:
    """What :meth:`StepPlan.from_json` does."""
    found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
    if found != STEP_FORMAT:
        raise PlanMismatch(
            f"format is {found!r}, this version of remat reads {STEP_FORMAT!r} as the plan of a "
            "step; store it again with step_plan.save"
        )
    with refusing_malformed():
        plans = [plan_from_json(each) for each in data["plans"]]
        calls = tuple(plans[_count(index)] for index in data["calls"])
        phases = [_phase(row, len(calls)) for row in data["phases"]]
        problems = [replace(plan.problem, fixed_bytes=0) for plan in calls]
        joined = join(problems, phases, data["resident"])
        plan = StepPlan(
            memory_budget=data["memory_budget"],
            plans=calls,
            joined=joined,
            solution=solution_from_json(
                joined.problem, data["solution"], calls[0].link if calls else None
            ),
            baseline=steps_from_json(data["baseline"]),
            least_peak=data["least_peak"],
        )
        simulate(joined.problem.unrestricted, plan.baseline)
        check_size("memory_budget", plan.memory_budget)
        check_size("least_peak", plan.least_peak)
    return plan


def _phase(row: Mapping[str, Any], calls: int) -> Phase:
    if row["kind"] not in _KINDS or not -1 <= row["call"] < calls:
        raise PlanMismatch(f"unknown phase {dict(row)!r}; the step has {calls} calls")
    return Phase(row["kind"], row["call"], row["beside"])


def _count(index: Any) -> int:
    """An index that was stored: a negative one would quietly mean another plan."""
    if not isinstance(index, int) or index < 0:
        raise PlanMismatch(f"a call is of plan {index!r}; it must be an index, at least 0")
    return index
