"""Results as JSON lines, each with the version of the code that made it: a run can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
REMAT: Final = ("solvers", "passes", "remat", "tests/models")


def code_version(*sources: str) -> str:
    """A hash of torch's version and of the Python files and folders named, from the root."""
    digest = hashlib.sha256(torch.__version__.encode())
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def append(path: Path, version: str, row: Mapping[str, Any]) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"version": version, **row}, sort_keys=True) + "\n")


def read(path: Path, versions: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of ``path`` that one of these versions of the code made; none if it is not there."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.pop("version") in versions]
