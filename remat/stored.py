"""What a stored file holds: the plan of one graph, or of a whole step of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.plan_json import plan_from_json, read_stored
from remat.plans import Plan
from remat.solvers.errors import PlanMismatch

if TYPE_CHECKING:
    from remat.step_plan import StepPlan


def load_plan_or_step(path: str | Path) -> Plan | StepPlan:
    """Read what ``plan.save`` or ``step_plan.save`` wrote.

    Raises:
        PlanMismatch: it is neither, cannot be read, or does not add up.
    """
    try:
        return read_stored(path, _from_json)
    except OSError as error:
        raise PlanMismatch(f"cannot read {path}: {error.strerror or error}") from error


def _from_json(data: Any) -> Plan | StepPlan:
    if isinstance(data, Mapping) and str(data.get("format")).startswith("remat.step/"):
        from remat.step_json import step_plan_from_json  # imports torch

        return step_plan_from_json(data)
    return plan_from_json(data)
