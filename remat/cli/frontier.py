"""``remat frontier``: how much time each peak costs, as a curve, a table and a picture."""

from __future__ import annotations

import argparse
from typing import Final

from remat.cli._step import add_step, given_options, load_step
from remat.cli._terminal import add_output, check_output, print_report, spinner, writing

NAME: Final = "frontier"
HELP: Final = "plan a training step for a range of budgets; nothing is run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to plan, and for how many budgets."""
    add_step(parser)
    parser.add_argument("--points", type=int, default=9, help="how many budgets (default 9)")
    add_output(parser, "the curve, as SVG,")


def run(arguments: argparse.Namespace) -> int:
    """Plan them all, print curve and table, draw the picture."""
    check_output(arguments)
    options = given_options(arguments)
    with spinner("building the model"):
        model, args, kwargs, loss = load_step(*arguments.step)
    with spinner(f"planning for {arguments.points} budgets") as show:
        from remat.frontiers import frontier

        curve = frontier(
            model, args, kwargs, loss=loss, points=arguments.points, progress=show, **options
        )
    print_report(f"{curve.plot()}\n\n{curve}")
    if arguments.output is not None:
        with writing(arguments.output):
            curve.save_svg(arguments.output)
    return 0
