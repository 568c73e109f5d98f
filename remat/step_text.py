"""The plan of a whole step on one screen of eighty columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.report.names import cut_right
from remat.report.text import WIDTH, sections_of
from remat.solvers.units import format_bytes, format_share

if TYPE_CHECKING:
    from remat.step_plan import StepPlan


def step_text(plan: StepPlan) -> str:
    """As :func:`remat.report.text.plan_text`, with a table of the step's phases."""
    least = "" if plan.least_peak is None else f", least {format_bytes(plan.least_peak)}"
    calls = len(plan.plans)
    head = [
        ("step", f"{calls} graph call{'s' * (calls != 1)}{_where_it_runs(plan)}"),
        ("budget", format_bytes(plan.memory_budget)),
        ("peak", f"{format_bytes(plan.peak)} (without remat {format_bytes(plan.baseline_peak)}"
                 f"{least})"),
        ("resident", f"{format_bytes(plan.joined.problem.fixed_bytes)} of that: parameters, "
                     "inputs, state"),
        ("beside", f"{format_bytes(plan.beside_bytes)} of that: gradients, what passes between "
                   "graphs, eager code"),
        ("eager", f"peak {format_bytes(plan.eager_peak)} while code outside the graphs runs"),
    ]  # fmt: skip
    extra = f"{format_share(plan.extra_time)} time, {format_share(plan.extra_flops)} FLOPs"
    return sections_of(plan, head, f"{extra} in the graphs", _phases(plan))


def _where_it_runs(plan: StepPlan) -> str:
    return f", {plan.plans[0].executor} on {plan.plans[0].device}" if plan.plans else ""


def _phases(plan: StepPlan) -> list[str]:
    lines = [f"{'phase':<14}{'beside':>12}{'kept':>12}{'peak':>12}"]
    for phase, peak in zip(plan.joined.phases, plan.peaks, strict=True):
        name = phase.kind if phase.call < 0 else f"{phase.kind} {phase.call}"
        kept = plan.kept_bytes(phase.call) if phase.kind == "forward" else 0
        row = (
            f"{name:<14}{format_bytes(phase.beside):>12}"
            f"{format_bytes(kept) if kept else '':>12}{format_bytes(peak):>12}"
        )
        lines.append(cut_right(row, WIDTH))
    return lines
