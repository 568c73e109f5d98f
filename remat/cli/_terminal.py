"""What subcommands share: a spinner, and files that are never overwritten by accident."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from remat.solvers.errors import InvalidOption
from remat.solvers.units import format_seconds

Progress = Callable[[float | None, float], None]

SPINNER_DELAY: Final = 1.0  # seconds: what is quicker needs no spinner


@contextmanager
def spinner(message: str) -> Iterator[Progress]:
    """Show that work goes on: on a terminal's stderr, after a second, until the block ends.

    What it yields shows how far a solver is; give it as ``progress=``.
    """
    if not sys.stderr.isatty():
        yield lambda best, bound: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(message)
    timer = threading.Timer(SPINNER_DELAY, status.start)
    timer.daemon = True
    timer.start()

    def show(best: float | None, bound: float) -> None:
        gap = "" if not best else f", at most {max(0.0, 1 - bound / best):.2%} from the best"
        found = "no plan yet" if best is None else f"a plan of {format_seconds(best)}"
        status.update(f"{message}: {found}{gap}")

    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def print_report(text: str) -> None:
    """Print a report: numbers in colour on a terminal, plain text into a pipe or a file."""
    if not sys.stdout.isatty():
        # Where the locale has no bars and arrows, a report with question marks beats none.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        print(text, flush=True)
        return
    from rich.console import Console

    Console(soft_wrap=True, markup=False, emoji=False).print(text)


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    """The options ``-o FILE`` and ``--force``."""
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=f"write {what} to FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it is there")


def check_output(arguments: argparse.Namespace) -> None:
    """Refuse to overwrite, before the work is done rather than after it.

    Raises:
        InvalidOption: the file is there and ``--force`` was not given, or its folder is not there.
    """
    output = arguments.output
    if output is None:
        return
    if output.is_dir() or (output.exists() and not arguments.force):
        remedy = "name a file in it" if output.is_dir() else "add --force to overwrite it"
        raise InvalidOption(f"{output} is there already; {remedy}, or choose another name")
    if not output.absolute().parent.is_dir():
        raise InvalidOption(f"{output}: there is no folder {output.parent}; make it first")
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise InvalidOption(f"{output} may not be written; choose another name")
