"""Every line of docs/guarantees.md names a test, and the test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith("|---") and "Held by" not in line
]


def test_every_promise_names_a_test_that_exists() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(ROWS) > 30
    for row in ROWS:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, f"no test is named in: {row}"
        assert set(named) <= defined, f"{set(named) - defined} is not defined: {row}"


def test_every_loop_is_promised_or_refused() -> None:
    text = "\n".join(ROWS)
    loops = [
        name
        for path in (ROOT / "tests" / "models").glob("test_loops*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert [name for name in loops if f"`{name}`" not in text] == []
