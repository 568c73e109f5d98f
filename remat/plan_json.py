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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from remat.files import write_whole
from remat.plans import Plan
from remat.solvers.errors import InvalidProblem, InvalidSchedule, PlanMismatch
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution, Status, Step
from remat.solvers.simulate import simulate

FORMAT: Final = "remat.plan/1"

Stored = TypeVar("Stored")

_TEXTS: Final = ("remat_version", "torch_version", "device", "executor", "graph_hash")
_PLAIN: Final = (*_TEXTS, "memory_budget", "least_peak")
_SIZES: Final = ("memory_budget", "least_peak", "replayed_peak")
_STORED: Final = (
    "problem_key", "memory_budget", "status", "peak_lower_bound", "floor_op", "solver",
    "solve_time",
)  # fmt: skip


def save_plan(plan: Plan, path: str | Path) -> None:
    """What :meth:`Plan.save` does."""
    write_json(path, plan_to_json(plan))


def load_plan(path: str | Path) -> Plan:
    """What :meth:`Plan.load` does."""
    return read_stored(path, plan_from_json)


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write canonical JSON, gzip-compressed where the path ends in ``.gz``."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    raw = text.encode()
    write_whole(path, gzip.compress(raw, mtime=0) if Path(path).suffix == ".gz" else raw)


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


def read_stored(path: str | Path, from_json: Callable[[Any], Stored]) -> Stored:
    """What a file holds, read by ``from_json``; a refusal names the file.

    Raises:
        PlanMismatch: it is no JSON, or ``from_json`` refuses it.
        OSError: it cannot be read.
    """
    data = read_json(path)
    try:
        return from_json(data)
    except PlanMismatch as error:
        raise PlanMismatch(f"{path}: {error}") from error


@contextmanager
def refusing_malformed() -> Iterator[None]:
    """Say of what lacks a field, or has one of another kind, that it is no plan.

    Raises:
        PlanMismatch: in place of the error that it led to.
    """
    try:
        yield
    except (InvalidProblem, InvalidSchedule) as error:
        raise PlanMismatch(f"the stored plan cannot run: {error}") from error
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise PlanMismatch(f"malformed plan: {type(error).__name__} {error}") from error


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
    with refusing_malformed():
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
        _check_kinds(plan)
    return plan


def _check_kinds(plan: Plan) -> None:
    """What nothing else looks at until it is printed."""
    for name in _TEXTS:
        if not isinstance(getattr(plan, name), str):
            raise TypeError(f"{name} is {getattr(plan, name)!r}, which is no text")
    for name in _SIZES:
        check_size(name, getattr(plan, name))


def check_size(name: str, size: Any) -> None:
    """Make sure that a stored figure is a number of bytes, or None.

    Raises:
        TypeError: it is neither.
    """
    if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
        raise TypeError(f"{name} is {size!r}, which is no number of bytes")


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
    if data["status"] not in get_args(Status):
        raise ValueError(f"the status {data['status']!r} is none of {', '.join(get_args(Status))}")
    timeline = simulate(problem, schedule, link)
    bound = data["lower_bound"]
    check_size("the solution's memory_budget", data["memory_budget"])
    for name, seconds in (("lower_bound", bound), ("solve_time", data["solve_time"])):
        if not (isinstance(seconds, int | float) or (name == "lower_bound" and bound is None)):
            raise TypeError(f"{name} is {seconds!r}, which is no number of seconds")
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
