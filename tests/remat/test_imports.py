"""What an import costs, and which way imports point. Each case is a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import remat

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numba", "networkx", "pulp", "rich", "transformers")


def _imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_remat_loads_nothing_heavy() -> None:
    assert _imported_by("import remat").isdisjoint((*HEAVY, "numpy", "argparse"))


@pytest.mark.parametrize("name", ["RematError", "BudgetTooSmall", "InvalidOption", "PlanMismatch"])
def test_errors_load_nothing_heavy(name: str) -> None:
    assert _imported_by(f"from remat import {name}").isdisjoint((*HEAVY, "numpy"))


def test_solvers_know_no_torch() -> None:
    """Every module of the solvers, not only the package's own file."""
    statement = (
        "import pkgutil, importlib, remat.solvers as s\n"
        "for found in pkgutil.walk_packages(s.__path__, 'remat.solvers.'):\n"
        "    importlib.import_module(found.name)"
    )
    assert "torch" not in _imported_by(statement)


@pytest.mark.parametrize(
    "module", ["remat.cli", "remat.options", "remat.plans", "remat.report.text"]
)
def test_the_face_loads_torch_only_when_it_must(module: str) -> None:
    assert _imported_by(f"import {module}").isdisjoint(("torch", "rich", "transformers"))


def test_one_copy_of_every_class() -> None:
    modules = _imported_by("import remat.solvers.simulate, remat.passes.costs")
    assert modules.isdisjoint(("solvers", "passes", "solvers.problem"))


def test_no_module_bears_the_name_of_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules(remat.__path__)}
    assert modules.isdisjoint(remat.__all__)


def test_public_names_are_listed_and_an_unknown_one_is_refused() -> None:
    assert set(remat.__all__) <= set(dir(remat))
    with pytest.raises(AttributeError, match="module 'remat' has no attribute 'plann'"):
        _ = remat.plann  # type: ignore[attr-defined]
