"""``remat show``: a stored plan on one screen."""

from __future__ import annotations

import argparse
from typing import Final

from remat.cli._terminal import print_report
from remat.solvers.errors import PlanMismatch

NAME: Final = "show"
HELP: Final = "print a stored plan: budget, peak, extra time, what is kept by layer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One stored plan."""
    parser.add_argument(
        "plan", metavar="PLAN.json", help="a plan written by plan.save or remat plan"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    from remat.plans import Plan

    try:
        plan = Plan.load(arguments.plan)
    except OSError as error:
        raise PlanMismatch(f"cannot read {arguments.plan}: {error.strerror}") from error
    print_report(str(plan))
    return 0
