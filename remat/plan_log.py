"""What was planned, in torch's own logs.

``TORCH_LOGS=remat`` prints a line for each plan, ``TORCH_LOGS=+remat`` the whole plan as well;
``TORCH_TRACE=folder`` gets the plan's JSON as the artifact ``remat_plan`` of its graph (and
``remat_step_plan`` for the plan of a whole step), which ``tlparse`` shows.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final, Protocol

from remat.passes.torch_private.logs import add_artifact
from remat.plans import Unplanned
from remat.solvers.units import format_bytes

_LOG: Final = logging.getLogger("remat")

PLAN: Final = "remat_plan"
STEP_PLAN: Final = "remat_step_plan"


class AnyPlan(Protocol):
    """What plans of graphs and of steps have in common."""

    @property
    def memory_budget(self) -> int | None:
        """Bytes, or None."""

    @property
    def peak(self) -> int:
        """Bytes."""

    @property
    def baseline_peak(self) -> int:
        """Bytes."""

    @property
    def extra_time(self) -> float:
        """A share of the time without remat."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""


def log_plan(plan: AnyPlan | Unplanned, name: str = PLAN) -> None:
    """Say what was planned to whoever listens.

    Args:
        name: the artifact's name in a trace.
    """
    if isinstance(plan, Unplanned):
        _LOG.info("%s", plan)
        return
    budget = "none" if plan.memory_budget is None else format_bytes(plan.memory_budget)
    _LOG.info(
        "%s: budget %s, peak %s (without remat %s), %+.1f %% time",
        name.removeprefix("remat_").replace("_", " "),
        budget,
        format_bytes(plan.peak),
        format_bytes(plan.baseline_peak),
        100 * plan.extra_time,
    )
    _LOG.debug("%s", plan)
    add_artifact(name, lambda: json_lines(plan))


def json_lines(plan: AnyPlan) -> str:
    """The plan's JSON, one field a line: readers of a trace do not like endless lines."""
    return json.dumps(plan.to_json(), indent=0, sort_keys=True, allow_nan=False)
