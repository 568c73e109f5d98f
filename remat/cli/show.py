"""``remat show``: a stored plan on one screen, or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from remat.cli._terminal import check_output, print_report, spinner, writing
from remat.solvers.errors import InvalidOption

NAME: Final = "show"
HELP: Final = "print a stored plan, or write it as a page: budget, peak, time, what is kept where"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One stored plan, and where its page goes."""
    parser.add_argument(
        "plan", metavar="PLAN.json", help="a plan written by plan.save or remat plan"
    )
    parser.add_argument(
        "--html",
        dest="output",
        metavar="PAGE.html",
        type=Path,
        help="write one self-contained page instead: memory over the step, every decision",
    )
    parser.add_argument(
        "--points", type=int, metavar="N", help="with --html: also solve for N budgets and draw it"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for each of the N budgets",
    )
    parser.add_argument("--force", action="store_true", help="overwrite PAGE.html if it is there")


def run(arguments: argparse.Namespace) -> int:
    """Print it, or write the page."""
    from remat.stored import load_plan_or_step

    if arguments.points is not None and arguments.output is None:
        raise InvalidOption("--points is for the page; add --html PAGE.html, or leave it out")
    if arguments.force and arguments.output is None:
        raise InvalidOption("--force is for the page; add --html PAGE.html, or leave it out")
    check_output(arguments)
    plan = load_plan_or_step(arguments.plan)
    if arguments.output is None:
        print_report(str(plan))
        return 0
    from remat.plans import Plan
    from remat.report.html import subject_of, write_page

    if isinstance(plan, Plan):
        subject = subject_of(plan)
    else:
        from remat.step_page import subject_of_step

        subject = subject_of_step(plan)
    points = None
    if arguments.points is not None:
        with spinner(f"planning for {arguments.points} budgets") as show:
            from remat.report.html_curve import curve_of

            points = curve_of(subject, arguments.points, arguments.time_limit, show).points
    with writing(arguments.output):
        write_page(arguments.output, subject, points)
    print_report(f"wrote {arguments.output}")
    return 0
