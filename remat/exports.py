"""A plan in the formats of other tools: ``remat.export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from remat.files import write_whole
from remat.plans import Plan
from remat.report.events import Scheduled
from remat.solvers.errors import InvalidOption

if TYPE_CHECKING:
    from remat.step_plan import StepPlan

Format = Literal["snapshot", "chrome", "json", "graphviz"]

FORMATS: Final = {
    "snapshot": "PyTorch memory snapshot, for pytorch.org/memory_viz",
    "chrome": "Chrome trace, for ui.perfetto.dev",
    "json": "the plan itself; its schema is docs/plan.schema.json",
    "graphviz": "graph, for dot",
}


def export(plan: Plan | StepPlan, path: str | Path, to: Format) -> None:
    """Write a plan, of one graph or of a whole step, in the format of another tool.

    Args:
        path: the file; it is overwritten.
        to: ``"snapshot"``, a memory snapshot as ``torch.cuda.memory._dump_snapshot`` writes it, for
            pytorch.org/memory_viz; ``"chrome"``, a trace for ui.perfetto.dev; ``"json"``, the
            stored plan, indented; ``"graphviz"``, for ``dot``.

    Under inductor these show the schedule the code was compiled by, whose peak is an estimate.

    Raises:
        InvalidOption: another format.
        OSError: the file cannot be written.
    """
    write_whole(path, exported(plan, to))


def exported(plan: Plan | StepPlan, to: str) -> str | bytes:
    """A plan in the format of another tool: bytes for ``"snapshot"``, text for the others.

    Raises:
        InvalidOption: another format.
    """
    if to == "snapshot":
        from remat.report.snapshot import snapshot_bytes

        return snapshot_bytes(scheduled(plan))
    return export_text(plan, to)


def export_text(plan: Plan | StepPlan, to: str) -> str:
    """A plan in one of the formats that are text.

    Raises:
        InvalidOption: another format, or ``"snapshot"``, which is none.
    """
    if to == "chrome":
        from remat.report.chrome import chrome_text

        return chrome_text(scheduled(plan))
    if to == "graphviz":
        from remat.report.graphviz import graphviz_text

        return graphviz_text(scheduled(plan))
    if to == "json":
        data: dict[str, Any] = plan.to_json()
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"
    if to == "snapshot":
        raise InvalidOption("a memory snapshot is no text but a pickle: it needs a file to go to")
    raise InvalidOption(f"to={to!r}; a plan can be exported to {', '.join(FORMATS)}")


def scheduled(plan: Plan | StepPlan) -> Scheduled:
    """The schedule of a plan, of one graph or of a whole step, and what it is compared with."""
    if isinstance(plan, Plan):
        name = plan.problem.name or plan.graph_hash[:12]
        return Scheduled(
            title=f"remat plan {name}, {plan.executor} on {plan.device}",
            problem=plan.problem,
            schedule=plan.solution.schedule,
            timeline=plan.solution.timeline,
            baseline=plan.baseline,
            baseline_timeline=plan.baseline_timeline,
            memory_budget=plan.memory_budget,
            code_peak=None if plan.executor == "eager" else plan.replayed_peak,
            link=plan.link,
        )
    return Scheduled(
        title=f"remat plan of {plan.problem.name}",
        problem=plan.problem,
        schedule=plan.solution.schedule,
        timeline=plan.solution.timeline,
        baseline=plan.baseline,
        baseline_timeline=plan.baseline_timeline,
        memory_budget=plan.memory_budget,
        link=plan.link,
    )
