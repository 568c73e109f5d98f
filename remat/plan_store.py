"""Plans beside inductor's caches, one file a compiled graph.

A step that comes out of inductor's caches was planned in an earlier process. What was decided then
is read here; a plan that is not found is made again, and so is the code.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from remat.cost.store import cache_folder, replace_file
from remat.plans import Plan
from remat.solvers.errors import PlanMismatch

FORMAT: Final = 1


@dataclass(frozen=True)
class StoredPlan:
    """A plan, and the salt of the key that its code is cached under."""

    plan: Plan
    salt: str


class PlanStore:
    """Plans by key; several processes may use it at once, each file is replaced as a whole."""

    def __init__(self) -> None:
        self.folder = cache_folder() / "plans"

    def path(self, key: str) -> Path:
        """The file of one key."""
        return self.folder / f"{key}.json"

    def load(self, key: str) -> StoredPlan | None:
        """What was saved for ``key``; None, and a warning, if it cannot be read."""
        path = self.path(key)
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if data["format"] != FORMAT or data["key"] != key:
                return None
            return StoredPlan(Plan.from_json(data["plan"]), str(data["salt"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, PlanMismatch) as error:
            warnings.warn(f"cannot read {path}: {error!r}; it is planned again", stacklevel=2)
            return None

    def save(self, key: str, stored: StoredPlan) -> None:
        """Remember a plan; where it cannot be written, the next process plans again."""
        path = self.path(key)
        content = {
            "format": FORMAT, "key": key, "salt": stored.salt, "plan": stored.plan.to_json(),
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            warnings.warn(
                f"cannot write {path}: {error}; the next process plans again. Set REMAT_CACHE_DIR "
                "to a folder that can be written",
                stacklevel=2,
            )
