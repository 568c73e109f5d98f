"""Compiler-level graph rematerialization for PyTorch: train within a memory budget.

The public names are loaded when first used (PEP 562): ``import remat`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from remat.version import __version__ as __version__

if TYPE_CHECKING:
    from remat.api import compile as compile
    from remat.api import plan as plan
    from remat.comparison import compare as compare
    from remat.exports import export as export
    from remat.frontiers import frontier as frontier
    from remat.measurement import measure as measure
    from remat.options import Options as Options
    from remat.plans import Plan as Plan
    from remat.solvers.errors import BudgetTooSmall as BudgetTooSmall
    from remat.solvers.errors import CaptureError as CaptureError
    from remat.solvers.errors import InvalidOption as InvalidOption
    from remat.solvers.errors import PlanMismatch as PlanMismatch
    from remat.solvers.errors import RematError as RematError
    from remat.timelines import measure_timeline as measure_timeline
    from remat.whole_step import compile_step as compile_step

_HOME: Final = {
    "compare": "remat.comparison",
    "compile": "remat.api",
    "compile_step": "remat.whole_step",
    "plan": "remat.api",
    "export": "remat.exports",
    "frontier": "remat.frontiers",
    "measure": "remat.measurement",
    "measure_timeline": "remat.timelines",
    "Options": "remat.options",
    "Plan": "remat.plans",
    "BudgetTooSmall": "remat.solvers.errors",
    "CaptureError": "remat.solvers.errors",
    "InvalidOption": "remat.solvers.errors",
    "PlanMismatch": "remat.solvers.errors",
    "RematError": "remat.solvers.errors",
}

__all__ = [
    "BudgetTooSmall",
    "CaptureError",
    "InvalidOption",
    "Options",
    "Plan",
    "PlanMismatch",
    "RematError",
    "__version__",
    "compare",
    "compile",
    "compile_step",
    "export",
    "frontier",
    "measure",
    "measure_timeline",
    "plan",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
