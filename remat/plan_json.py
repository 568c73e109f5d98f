"""A plan as a file: canonical JSON, format ``remat.plan/1``.

A stored plan holds decisions and steps, and only the few figures that tell whether it is whole:
bytes and seconds are simulated again when it is read, so there is one truth.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from remat.plans import Plan
from remat.solvers.errors import InvalidProblem, InvalidSchedule, PlanMismatch
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution, Step
from remat.solvers.simulate import simulate

FORMAT: Final = "remat.plan/1"

_PLAIN: Final = (
    "remat_version", "torch_version", "device", "executor",
    "graph_hash", "memory_budget", "least_peak",
)  # fmt: skip
_STORED: Final = (
    "problem_key", "memory_budget", "status", "peak_lower_bound", "floor_op", "solver",
    "solve_time",
)  # fmt: skip


def save_plan(plan: Plan, path: str | Path) -> None:
    """What :meth:`Plan.save` does."""
    write_json(path, plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """What :meth:`Plan.load` does."""
    data = read_json(path)
    try:
        return plan_from_json(data)
    except PlanMismatch as error:
        raise PlanMismatch(f"{path}: {error}") from error


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write canonical JSON, gzip-compressed where the path ends in ``.gz``."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    path, raw = Path(path), text.encode()
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def read_json(path: str | Path) -> Any:
    """What :func:`write_json` wrote.

    Raises:
        PlanMismatch: it is no JSON.
        OSError: it cannot be read.
    """
    raw = Path(path).read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise PlanMismatch(f"{path} is no stored plan: not JSON ({error})") from error


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """What :meth:`Plan.to_json` does."""
    return {
        "format": FORMAT,
        "remat_version": plan.remat_version,
        "torch_version": plan.torch_version,
        "device": plan.device,
        "executor": plan.executor,
        "graph_hash": plan.graph_hash,
        "memory_budget": plan.memory_budget,
        "problem": plan.problem.to_json(),
        "solution": solution_to_json(plan.solution),
        "baseline": steps_to_json(plan.baseline),
        "least_peak": plan.least_peak,
        "notes": list(plan.notes),
        "replayed_peak": plan.replayed_peak,
        "keep": list(plan.keep),
        "recompute": list(plan.recompute),
        "link": None if plan.link is None else dataclasses.asdict(plan.link),
        "offload": plan.offload,
    }


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """What :meth:`Plan.from_json` does."""
    found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
    if found != FORMAT:
        raise PlanMismatch(
            f"format is {found!r}, this version of remat reads {FORMAT!r}; plan again with "
            "remat.plan"
        )
    try:
        problem = Problem.from_json(data["problem"])
        link = None if data.get("link") is None else Link(**data["link"])
        plan = Plan(
            problem=problem,
            solution=solution_from_json(problem, data["solution"], link),
            baseline=steps_from_json(data["baseline"]),
            notes=tuple(data["notes"]),
            replayed_peak=data.get("replayed_peak"),
            keep=tuple(data.get("keep", ())),
            recompute=tuple(data.get("recompute", ())),
            link=link,
            offload=data.get("offload"),
            **{name: data[name] for name in _PLAIN},
        )
        _ = plan.baseline_timeline  # a baseline that cannot run is refused here, not when read
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InvalidProblem | InvalidSchedule):
            raise PlanMismatch(f"the stored plan cannot run: {error}") from error
        raise PlanMismatch(f"malformed plan: {type(error).__name__} {error}") from error
    return plan


def steps_to_json(schedule: Schedule) -> list[list[Any]]:
    """Each step as ``[kind, index]``."""
    return [[step.kind, step.index] for step in schedule.steps]


def steps_from_json(rows: list[list[Any]]) -> Schedule:
    """The inverse of :func:`steps_to_json`.

    Raises:
        InvalidSchedule: a step of a kind or an index that there is not.
    """
    kinds = ("compute", "free", "offload", "reload", "wait")
    for kind, index in rows:
        if kind not in kinds or not isinstance(index, int) or index < 0:
            raise InvalidSchedule(f"unknown step {[kind, index]!r}")
    return Schedule(tuple(Step(kind, index) for kind, index in rows))


def solution_to_json(solution: Solution) -> dict[str, Any]:
    """Steps, and the few figures that tell whether they are whole."""
    # Nothing beats infinitely many seconds where no schedule fits; JSON has no infinity.
    bound = solution.lower_bound if math.isfinite(solution.lower_bound) else None
    return {
        **{name: getattr(solution, name) for name in _STORED},
        "steps": steps_to_json(solution.schedule),
        "peak": solution.peak,
        "lower_bound": bound,
        "failures": list(solution.failures),
    }


def solution_from_json(
    problem: Problem, data: Mapping[str, Any], link: Link | None = None
) -> Solution:
    """The inverse of :func:`solution_to_json`: the steps are simulated again.

    Args:
        link: that its transfers were planned for.

    Raises:
        PlanMismatch: it solves another problem, or its peak does not follow from its steps.
        InvalidSchedule: its steps cannot run.
    """
    schedule = steps_from_json(data["steps"])
    timeline = simulate(problem, schedule, link)
    bound = data["lower_bound"]
    solution = Solution(
        schedule=schedule,
        timeline=timeline,
        lower_bound=math.inf if bound is None else bound,
        failures=tuple(data["failures"]),
        **{name: data[name] for name in _STORED},
    )
    if solution.problem_key != problem.key:
        raise PlanMismatch(
            "the solution belongs to another problem: the file was edited, or written by another "
            "version of remat; plan again with remat.plan"
        )
    if timeline.peak != data["peak"]:
        raise PlanMismatch(
            f"the stored peak is {data['peak']} bytes, but its steps peak at {timeline.peak}: the "
            "file was edited, or written by another version of remat; plan again with remat.plan"
        )
    return solution
