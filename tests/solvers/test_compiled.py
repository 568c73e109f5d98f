"""Compiled functions where nothing can be cached."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numba
import pytest

from remat.solvers import compiled as module


def double(x: int) -> int:
    return 2 * x


def test_without_a_directory_to_cache_in_it_compiles_uncached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def njit(**options: Any) -> Callable[..., Any]:
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(module, "numba", SimpleNamespace(njit=njit))
    assert module.compiled(double)(21) == 42
    assert asked == [True, False]
