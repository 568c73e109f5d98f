"""What the user decides himself: ``keep`` and ``recompute``, patterns of modules.

A pattern is a dotted path, part by part as :mod:`fnmatch` reads it: ``*`` is any one part, or any
rest of one (``layers.*.mlp``, ``layers.1?``, ``encoder.layer_[0-3]``). It means the modules whose
path it matches, and everything below them.

* ``keep``: no op of these modules is ever run again; what backward needs of them waits for it.
* ``recompute``: like a checkpoint around each of these modules. What is made inside one, and read
  by nobody outside it, is not there when backward starts. What enters or leaves it may be.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Op, Problem

_NEAR: Final = 0.3  # least likeness of a path that is suggested
_LISTED: Final = 5

Parts = tuple[str, ...]


def constrain(problem: Problem, keep: Sequence[str] = (), recompute: Sequence[str] = ()) -> Problem:
    """``problem`` with the user's decisions in it.

    Args:
        problem: its ops bear the paths of their modules (:attr:`Op.layer`).
        keep, recompute: patterns; see the head of this file.

    Raises:
        InvalidOption: a pattern that means no module of the problem (the nearest path is named),
            or a module that is to be both kept and recomputed.
    """
    for option, patterns in (("keep", keep), ("recompute", recompute)):
        for pattern in patterns:
            _check_known(problem, option, pattern)
    _check_disjoint(problem, keep, recompute)
    ops = tuple(
        replace(op, rerunnable=op.rerunnable and not lies_in(op.layer, keep)) for op in problem.ops
    )
    dropped = set(_made_inside(problem, recompute))
    values = tuple(
        replace(value, keepable=False, offloadable=False) if v in dropped else value
        for v, value in enumerate(problem.values)
    )
    return replace(problem, ops=ops, values=values)


def cannot_be_recomputed(problem: Problem, recompute: Sequence[str]) -> tuple[str, ...]:
    """Names of forward ops in ``recompute`` modules that may not be run again all the same."""
    return tuple(
        problem.ops[index].name
        for index in problem.forward
        if not problem.ops[index].rerunnable
        and problem.ops[index].writes
        and _module(problem.ops[index], recompute) is not None
    )


def _module(op: Op, patterns: Iterable[str]) -> Parts | None:
    """The outermost module that a pattern matches and the op lies in."""
    path = _parts(op.layer)
    depths = [
        len(wanted)
        for pattern in patterns
        if len(wanted := _parts(pattern)) <= len(path) and _matches(wanted, path)
    ]
    return path[: min(depths)] if depths else None


def lies_in(layer: str, patterns: Iterable[str]) -> bool:
    """Whether a module path lies in a module that a pattern matches."""
    path = _parts(layer)
    return any(len(w) <= len(path) and _matches(w, path) for w in map(_parts, patterns))


def _matches(wanted: Parts, path: Parts) -> bool:
    return all(fnmatchcase(part, pattern) for part, pattern in zip(path, wanted, strict=False))


def _parts(path: str) -> Parts:
    return tuple(path.split(".")) if path else ()


def _made_inside(problem: Problem, recompute: Sequence[str]) -> Iterator[int]:
    """The values that only ops of the module that makes them read in forward."""
    module = [_module(op, recompute) for op in problem.ops]
    outside = {
        v
        for index in problem.forward
        for v in problem.ops[index].reads
        if problem.producer[v] >= 0 and module[problem.producer[v]] != module[index]
    }
    for index in problem.forward:
        op = problem.ops[index]
        if module[index] is not None and op.rerunnable:
            for v in op.writes:
                value = problem.values[v]
                if v not in outside and value.bytes and not value.output:
                    yield v


def _check_known(problem: Problem, option: str, pattern: str) -> None:
    if not is_known(problem.ops, pattern):
        raise unknown_pattern(problem.ops, option, pattern, "this graph")


def is_known(ops: Iterable[Op], pattern: str) -> bool:
    """Whether ``pattern`` means a module that one of the ops lies in."""
    return any(_module(op, (pattern,)) is not None for op in ops)


def unknown_pattern(ops: Iterable[Op], option: str, pattern: str, where: str) -> InvalidOption:
    """The error for a pattern that means no module of ``where``, whose ops these are."""
    paths = dict.fromkeys(
        ".".join(path[:depth])
        for path in dict.fromkeys(_parts(op.layer) for op in ops)
        for depth in range(1, len(path) + 1)
    )
    near = difflib.get_close_matches(pattern, paths, n=1, cutoff=_NEAR)
    hint = f"the nearest is {near[0]!r}" if near else "there are " + _listed(list(paths))
    return InvalidOption(
        f"{option}={pattern!r} matches no module of {where}; {hint} "
        "(a pattern is a path from the model down, in which * stands for one part: layers.*.mlp)"
    )


def _listed(paths: list[str]) -> str:
    if not paths:
        return "none: no op of it belongs to a module"
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(repr(path) for path in paths[:_LISTED]) + more


def _check_disjoint(problem: Problem, keep: Sequence[str], recompute: Sequence[str]) -> None:
    for op in problem.ops:
        kept, again = _module(op, keep), _module(op, recompute)
        if kept is not None and again is not None:
            raise InvalidOption(
                f"keep means {'.'.join(kept)!r} and recompute means {'.'.join(again)!r}, and "
                f"{op.layer!r} lies in both: a module is either kept or recomputed"
            )
