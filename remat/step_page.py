"""The page of a whole step: several graphs that share one budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from remat.report.html_data import Subject
from remat.solvers.problem import Problem
from remat.solvers.simulate import simulate

BETWEEN: Final = "between the graphs"

if TYPE_CHECKING:
    from remat.joined import Joined
    from remat.sharing import StepPlan


def subject_of_step(step: StepPlan) -> Subject:
    """What a page about the plan of a whole step shows."""
    calls, problem = step.plans, problem_by_call(step)
    timeline = simulate(problem.unrestricted, step.baseline)
    first = calls[0] if calls else None
    old_flops = timeline.flops
    return Subject(
        title=f"remat plan: {problem.name}",
        facts=()
        if first is None
        else (
            ("", f"{first.executor} on {first.device}"),
            ("costs", problem.cost),
            ("torch", first.torch_version),
            ("remat", first.remat_version),
            ("offload to", first.offload or ""),
        ),
        problem=problem,
        solution=step.solution,
        baseline=step.baseline,
        baseline_timeline=timeline,
        memory_budget=step.memory_budget,
        peak=step.peak,
        replayed_peak=None,
        least_peak=step.least_peak,
        extra_time=step.extra_time,
        extra_flops=step.solution.timeline.flops / old_flops - 1 if old_flops else 0.0,
        notes=tuple(dict.fromkeys(note for plan in calls for note in plan.notes)),
        text=str(step),
        marks=_marks(step.joined),
        link=step.link,
        several_calls=len(calls) > 1,
    )


def problem_by_call(step: StepPlan) -> Problem:
    """The problem of a step with layers named by their call, where there are several: two graphs
    may have one name for two layers.
    """
    joined, several, ops = step.joined, len(step.plans) > 1, []
    for op, origin in zip(joined.problem.ops, joined.origin, strict=True):
        if origin is None:
            layer = BETWEEN
        elif several:
            layer = f"call.{origin[0]}.{op.layer}".removesuffix(".")
        else:
            layer = op.layer
        ops.append(replace(op, layer=layer))
    return replace(joined.problem, ops=tuple(ops))


def _marks(joined: Joined) -> tuple[tuple[int, str], ...]:
    """(op, label) where each phase of the step begins."""
    marks, seen = [], set()
    for index, (origin, at) in enumerate(zip(joined.origin, joined.phase_of, strict=True)):
        if origin is None and at not in seen:
            seen.add(at)
            phase = joined.phases[at]
            call = "" if phase.call < 0 else f" {phase.call}"
            marks.append((at, index, f"{phase.kind}{call}"))
    return tuple((index, label) for _, index, label in sorted(marks))
