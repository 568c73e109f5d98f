"""``remat export``: a stored plan in the formats of other tools."""

from __future__ import annotations

import argparse
from typing import Final

from remat.cli._terminal import add_output, check_output, print_data, spinner, writing
from remat.solvers.errors import InvalidOption

NAME: Final = "export"
HELP: Final = "write a stored plan as a memory snapshot, a trace, JSON or a graph"

_FORMATS: Final = ("snapshot", "chrome", "json", "graphviz", "schema")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One stored plan, and the format."""
    parser.add_argument(
        "plan",
        metavar="PLAN.json",
        nargs="?",
        help="a plan written by remat plan, plan.save or step_plan.save",
    )
    parser.add_argument(
        "--to",
        choices=_FORMATS,
        required=True,
        help="snapshot: a pickle for pytorch.org/memory_viz; chrome: a trace for ui.perfetto.dev; "
        "json: the plan itself, indented; graphviz: for dot; schema: the JSON Schema of stored "
        "plans, which needs no PLAN.json",
    )
    add_output(parser, "it")


def run(arguments: argparse.Namespace) -> int:
    """Write it to the file that was named, or print it."""
    check_output(arguments)
    text = _schema() if arguments.to == "schema" else _export(arguments)
    if arguments.output is None and isinstance(text, str):
        print_data(text)
        return 0
    from remat.files import write_whole

    with writing(arguments.output):
        write_whole(arguments.output, text)
    return 0


def _schema() -> str:
    from remat.report.schema import schema_text

    return schema_text()


def _export(arguments: argparse.Namespace) -> str | bytes:
    """What goes to the file."""
    from remat.exports import exported
    from remat.stored import load_plan_or_step

    if arguments.plan is None:
        raise InvalidOption(f"--to {arguments.to} needs the plan: remat export PLAN.json --to …")
    if arguments.to == "snapshot" and arguments.output is None:
        raise InvalidOption(
            "a memory snapshot is a pickle: name the file it goes to, like -o plan.pickle"
        )
    with spinner(f"reading {arguments.plan}"):
        plan = load_plan_or_step(arguments.plan)
    with spinner(f"exporting to {arguments.to}"):
        return exported(plan, arguments.to)
