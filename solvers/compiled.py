"""Numba, typed: functions that run as machine code, without the interpreter lock.

The machine code is cached beside this package, or in the user's cache directory where that is
read-only, or not at all where neither can be written. A compiled function may use arrays, scalars
and named tuples of arrays, and allocates nothing: without numba's reference counting it compiles in
a third of the time.

Numba's cache notices a change of the file a function stands in, not of the functions it calls,
whose code is part of the caller's. So the qualified name of every compiled function, which numba
names its cache files by, ends in a digest of all files that define any: after a change of one of
them nothing cached before is found. What an older version left behind is not removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any, Final, TypeVar, cast

import numba

KERNEL_FILES: Final = ("anneal.py", "compiled.py", "evaluate.py", "moves.py", "seeds.py")
"""The files that define compiled functions, or the numbers and types these are compiled with."""

UNCACHED: Final[list[str]] = []
"""Why functions are compiled anew by every process; empty where machine code is cached."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` when it is first called; releases the interpreter lock while it runs."""
    return _compile(function, nogil=True)


def inner(function: _Function) -> _Function:
    """Like :func:`compiled`, for what only compiled functions call: makes no way in from Python."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def source_digest() -> str:
    """A digest of every kernel file.

    Raises:
        OSError: there are no sources, as where only byte code is installed.
    """
    digest = hashlib.sha256()
    for name in KERNEL_FILES:
        digest.update(resources.files(__package__).joinpath(name).read_bytes())
    return digest.hexdigest()[:12]


def _digest_or_none() -> str | None:
    try:
        return source_digest()
    except OSError as error:
        UNCACHED.append(f"machine code is not cached: {error}")
        return None


_DIGEST: Final = _digest_or_none()


def _compile(function: _Function, **options: bool) -> _Function:
    if _DIGEST is not None:
        function.__qualname__ = f"{function.__qualname__}_{_DIGEST}"
        try:
            return cast(_Function, numba.njit(cache=True, _nrt=False, **options)(function))
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            # Neither the package's directory nor the user's cache directory can be written.
            UNCACHED.append(f"machine code is not cached: {error}")
    return cast(_Function, numba.njit(_nrt=False, **options)(function))
