"""The page of a whole step: several graphs that share one budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.report.html_data import Subject

if TYPE_CHECKING:
    from remat.joined import Joined
    from remat.step_plan import StepPlan


def subject_of_step(step: StepPlan) -> Subject:
    """What a page about the plan of a whole step shows."""
    calls, problem = step.plans, step.problem
    first = calls[0] if calls else None
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
        baseline_timeline=step.baseline_timeline,
        memory_budget=step.memory_budget,
        peak=step.peak,
        replayed_peak=None,
        least_peak=step.least_peak,
        extra_time=step.extra_time,
        extra_flops=step.extra_flops,
        notes=step.notes,
        text=str(step),
        marks=_marks(step.joined),
        link=step.link,
        several_calls=step.several_calls,
    )


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
