"""Compiled functions: what their cache depends on, and where nothing can be cached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest

from remat.solvers import compiled as module

FOLDER = Path(module.__file__).parent


def double(x: int) -> int:
    return 2 * x


def refuse(message: str) -> tuple[SimpleNamespace, list[bool]]:
    """Numba that refuses to cache, with this message; and what it was asked for."""
    asked: list[bool] = []

    def njit(**options: Any) -> Callable[..., Any]:
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError(message)
        return numba.njit(**options)

    return SimpleNamespace(njit=njit), asked


def test_without_a_directory_to_cache_in_it_compiles_uncached_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, asked = refuse("cannot cache function: no locator available")
    monkeypatch.setattr(module, "numba", fake)
    monkeypatch.setattr(module, "UNCACHED", [])
    assert module.compiled(double)(21) == 42
    assert asked == [True, False]
    assert "no locator available" in module.UNCACHED[0]


def test_another_refusal_of_numba_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, asked = refuse("this signature is wrong")
    monkeypatch.setattr(module, "numba", fake)
    with pytest.raises(RuntimeError, match="this signature is wrong"):
        module.compiled(double)
    assert asked == [True]


def test_every_file_with_a_compiled_function_is_in_the_digest() -> None:
    defining = {
        path.name
        for path in FOLDER.glob("*.py")
        if "@compiled" in path.read_text() or "@inner" in path.read_text()
    }
    assert defining
    assert {*defining, "compiled.py"} == set(module.KERNEL_FILES)


INNER = """
from remat.solvers.compiled import inner

@inner
def answer(x: int) -> int:
    return x + 1
"""

OUTER = """
from remat.solvers.compiled import compiled
from remat.solvers.evaluate import answer

@compiled
def ask(x: int) -> int:
    return answer(x)
"""


@pytest.mark.slow
def test_a_changed_callee_changes_what_its_caller_in_another_file_answers(tmp_path: Path) -> None:
    """A small package in the place of the real one: numba alone would run the old machine code."""
    solvers = tmp_path / "remat" / "solvers"
    solvers.mkdir(parents=True)
    (solvers.parent / "__init__.py").touch()
    (solvers / "__init__.py").touch()
    shutil.copy(FOLDER / "compiled.py", solvers)
    for name in module.KERNEL_FILES:
        (solvers / name).touch()
    (solvers / "evaluate.py").write_text(INNER)
    (solvers / "anneal.py").write_text(OUTER)

    def answer() -> str:
        command = "from remat.solvers.anneal import ask; print(ask(1))"
        environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
        run = subprocess.run(
            [sys.executable, "-c", command],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()

    assert answer() == "2"
    assert list(solvers.glob("__pycache__/*ask*.nbi"))
    (solvers / "evaluate.py").write_text(INNER.replace("x + 1", "x + 1000"))
    assert answer() == "1001"
