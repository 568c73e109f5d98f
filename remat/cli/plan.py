"""``remat plan``: plan a training step without running it."""

from __future__ import annotations

import argparse
from typing import Final

from remat.cli._step import add_step, given_options, load_step, read_budget
from remat.cli._terminal import add_output, check_output, print_report, spinner, writing

NAME: Final = "plan"
HELP: Final = "plan a training step for a memory budget; nothing is run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to plan, and the options of ``remat.plan`` that a line of text can say."""
    add_step(parser)
    parser.add_argument(
        "--memory-budget",
        required=True,
        metavar="SIZE",
        type=read_budget,
        help='"8GiB", "512MB", a share of the device "80%%", "auto", or a fraction: 0.0 is the '
        "least peak there is, 1.0 no saving",
    )
    parser.add_argument(
        "--every-n-layers", type=int, metavar="N", help="checkpoint layer 1, N+1, …"
    )
    add_output(parser, "the plan")


def run(arguments: argparse.Namespace) -> int:
    """Plan it, print the plan, store it."""
    check_output(arguments)
    options = given_options(arguments)
    with spinner("building the model"):
        model, args, kwargs, loss = load_step(*arguments.step)
    with spinner("planning") as show:
        from remat.api import plan as make_plan

        plan = make_plan(model, args, kwargs, loss=loss, progress=show, **options)
    print_report(str(plan))
    if arguments.output is not None:
        with writing(arguments.output):
            plan.save(arguments.output)
    return 0
