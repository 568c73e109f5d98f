"""Numba, typed: functions that run as machine code, without the interpreter lock.

The machine code is cached beside this package, or in the user's cache directory where that is
read-only, or not at all where neither can be written. A compiled function may use arrays, scalars
and named tuples of arrays, and allocates nothing: without numba's reference counting it compiles in
a third of the time.

Numba's cache notices a change of the file a function stands in, not of the functions it calls: who
edits one of these files should delete ``__pycache__/*.nbi`` beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` when it is first called; releases the interpreter lock while it runs."""
    return _compile(function, nogil=True)


def inner(function: _Function) -> _Function:
    """Like :func:`compiled`, for what only compiled functions call: makes no way in from Python."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compile(function: _Function, **options: bool) -> _Function:
    try:
        return cast(_Function, numba.njit(cache=True, _nrt=False, **options)(function))
    except RuntimeError:  # numba found no directory to cache in, and refuses to decorate
        return cast(_Function, numba.njit(_nrt=False, **options)(function))
