"""What subcommands share: a spinner, and files that are never overwritten by accident."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from remat.solvers.errors import InvalidOption, RematError
from remat.solvers.units import format_seconds

Progress = Callable[[float | None, float], None]

SPINNER_DELAY: Final = 1.0  # seconds: what is quicker needs no spinner


@contextmanager
def spinner(message: str) -> Iterator[Progress]:
    """Show that work goes on: on a terminal's stderr, after a second, until the block ends.

    What it yields shows how far a solver is; give it as ``progress=``.
    """
    if not is_terminal(sys.stderr):
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
    # Where the locale has no bars and arrows, a report with question marks beats none.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if not is_terminal(sys.stdout):
        _print(text, end="\n")
        return
    from rich.console import Console

    Console(soft_wrap=True, markup=False, emoji=False).print(text)


def print_data(text: str) -> None:
    """Print what another program reads: UTF-8 whatever the locale, complete when this returns."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    _print(text, end="")


def _print(text: str, end: str) -> None:
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise RematError(f"cannot print: {error.strerror or error}") from error


def abandon_stdout() -> None:
    """Nobody can read it any more: Python flushes it once more when it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO | None) -> bool:
    """Python has None for a stream that was closed before it began (``>&-``)."""
    return stream is not None and stream.isatty()


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
    places = [output] if output.exists() else []
    if output.is_file() or not places:  # a new file is made in its folder and put in its place
        places.append(output.resolve().parent)
    if not all(os.access(place, os.W_OK) for place in places):
        raise InvalidOption(f"{output} may not be written; choose another name")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Say in words what kept a file from being written.

    Raises:
        RematError: the disk is full, the folder has gone, and the like.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # a pipe that was named as the file: its reader has seen enough
    except OSError as error:
        raise RematError(
            f"cannot write {output}: {error.strerror or error}; choose another name with -o, or "
            "make room"
        ) from error
