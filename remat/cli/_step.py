"""What subcommands that plan share: the user's step, and the options a line of text can say."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from remat.solvers.errors import InvalidOption

_WANTED: Final = "(model, args), (model, args, kwargs) or (model, args, kwargs, loss)"
_OPTIONS: Final = (
    "memory_budget", "solver", "every_n_layers", "time_limit", "gap", "device", "cost", "executor",
)  # fmt: skip


def add_step(parser: argparse.ArgumentParser) -> None:
    """What to plan, and how."""
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        type=_module_and_function,
        help=f"a function without arguments that returns {_WANTED}",
    )
    parser.add_argument("--solver", metavar="NAME", help='"auto" (default) or one algorithm')
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="for the solver")
    parser.add_argument("--gap", type=float, help="stop when at most this share could be gained")
    parser.add_argument("--device", metavar="NAME", help='what to plan for: "cpu", "cuda", "h100"')
    parser.add_argument("--executor", metavar="NAME", help='who would run it: "inductor", "eager"')
    parser.add_argument("--cost", metavar="MODEL", help='"measured", "roofline" or "flops"')


def read_budget(text: str) -> str | float:
    """On a command line nothing has quotes: ``0.5`` is the float, ``1`` is one byte."""
    return float(text) if re.fullmatch(r"\d*\.\d+|\d+\.", text) else text


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``remat.plan`` that were written, checked."""
    from remat.options import Options

    given = {name: getattr(arguments, name, None) for name in _OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    Options.make(**options)  # a wrong option is known before the model is built
    return options


def load_step(
    module: str, function: str
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any] | None, Callable[..., Any] | None]:
    """Call the user's function and check what it gives: model, args, kwargs, loss."""
    made = _find(module, function)()
    where = f"{module}:{function}"
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise InvalidOption(
            f"{where} returned a {type(made).__name__}{size}; it must return {_WANTED}"
        )
    model, args, kwargs, loss = [*made, None, None][:4]
    if not callable(model):
        raise InvalidOption(f"{where}: the model is a {type(model).__name__}; it must be a module")
    if not isinstance(args, tuple | list):
        raise InvalidOption(
            f"{where}: args is a {type(args).__name__}; it must be a tuple, like (batch,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidOption(f"{where}: kwargs is a {type(kwargs).__name__}; it must be a dict")
    if loss is not None and not callable(loss):
        raise InvalidOption(f"{where}: loss is a {type(loss).__name__}; it must be a function")
    return model, tuple(args), kwargs, loss


def _find(module: str, function: str) -> Callable[[], Any]:
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a script of this folder is what is meant
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        raise InvalidOption(
            f"there is no module {error.name!r} here or among the installed ones"
        ) from error
    for name in function.split("."):
        if not hasattr(found, name):
            raise InvalidOption(f"module {module!r} has no {function!r}")
        found = getattr(found, name)
    if not callable(found):
        raise InvalidOption(f"{module}:{function} is a {type(found).__name__}, not a function")
    return found


def _module_and_function(text: str) -> tuple[str, str]:
    module, colon, function = text.partition(":")
    dotted = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    if not (colon and re.fullmatch(dotted, module) and re.fullmatch(dotted, function)):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION, like train:make_step")
    return module, function
