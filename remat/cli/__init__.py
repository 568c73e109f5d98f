"""The command line: one subcommand a file, on a small protocol.

A subcommand is a module of this package with ``NAME``, ``HELP``, ``add_arguments(parser)`` and
``run(arguments) -> int``; it is found by being there. A module whose name begins with ``_`` is
none.
Subcommands import torch, rich and the rest inside ``run``, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from remat import __version__
from remat.solvers.errors import RematError

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
"""As shells report what ended by Ctrl-C: 128 and the number of the signal."""


class Subcommand(Protocol):
    """What a module of this package offers."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what the subcommand takes."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit code."""


def subcommands() -> dict[str, Subcommand]:
    """Every subcommand, by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"{__name__}.{module.name}")
            command = cast(Subcommand, loaded)
            found[command.NAME] = command
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0 is done, 1 a RematError, 2 wrong usage, 130 interrupted by Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="remat",
        description="Train within a memory budget: graph rematerialization for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"remat {__version__}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = subcommands()
    for name, command in commands.items():
        own = chosen.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(own)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ending:  # argparse has said why
        return ending.code if isinstance(ending.code, int) else USAGE
    try:
        return commands[arguments.command].run(arguments)
    except RematError as error:
        print(f"remat {arguments.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"remat {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `remat show plan.json | head`: the reader has seen enough
        from remat.cli._terminal import abandon_stdout

        abandon_stdout()
        return DONE
