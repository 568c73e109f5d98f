"""``remat compare``: what changed from one stored plan to another, and why."""

from __future__ import annotations

import argparse
from typing import Final

from remat.cli._terminal import print_report, spinner

NAME: Final = "compare"
HELP: Final = "compare two stored plans: what changed, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two stored plans."""
    for name, which in (("before", "the first"), ("after", "the second")):
        parser.add_argument(
            name,
            metavar=f"{name.upper()}.json",
            help=f"{which} plan, written by remat plan, plan.save or step_plan.save",
        )


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; 0 whether they differ or not."""
    from remat.comparison import compare
    from remat.stored import load_plan_or_step

    with spinner("reading the plans"):
        before, after = (load_plan_or_step(x) for x in (arguments.before, arguments.after))
    with spinner("comparing"):
        text = str(compare(before, after))
    print_report(text)
    return 0
