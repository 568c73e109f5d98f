"""Numba, typed: functions that run as machine code, without the interpreter lock.

The machine code is cached beside this package, or in the user's cache directory where that is
read-only. A compiled function may use arrays, scalars and named tuples of arrays, and allocates
nothing: without numba's reference counting it compiles in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` when it is first called; releases the interpreter lock while it runs."""
    return cast(_Function, numba.njit(cache=True, nogil=True, _nrt=False)(function))


def inner(function: _Function) -> _Function:
    """Like :func:`compiled`, for what only compiled functions call: makes no way in from Python."""
    options = {"cache": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(_Function, numba.njit(**options)(function))
