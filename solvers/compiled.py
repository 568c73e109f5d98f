"""Numba, typed: functions that run as machine code, without the interpreter lock.

The machine code is cached beside this package, or in the user's cache directory where that is
read-only. A function may only use arrays, scalars and named tuples of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` when it is first called; releases the interpreter lock while it runs."""
    return cast(_Function, numba.njit(cache=True, nogil=True)(function))
