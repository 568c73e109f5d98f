"""What was already solved in this process: plans of other budgets for the same problem.

A schedule that fits a larger budget at least as well is never forgotten: it is where the solver
starts, so predicted time does not grow with the budget.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule

_PROBLEMS_KEPT: Final = 16


@dataclass
class KnownPlans:
    """What is known about one problem, whatever is resident: that shifts every peak alike.

    Attributes:
        least: the schedule with the least peak that was found.
        schedules: every schedule that was found for some budget.
    """

    least: Schedule | None = None
    schedules: list[Schedule] = field(default_factory=list)

    def remember(self, schedule: Schedule) -> None:
        """Keep ``schedule``, once."""
        if schedule not in self.schedules:
            self.schedules.append(schedule)


_LOCK: Final = threading.Lock()
_KNOWN: Final[OrderedDict[str, KnownPlans]] = OrderedDict()


def known_plans(problem: Problem, link: Link | None = None) -> KnownPlans:
    """The record of ``problem``, made if there is none; the least recently used one is dropped.

    Args:
        link: plans that offload are known for a link.
    """
    with _LOCK:
        key = f"{dataclasses.replace(problem, fixed_bytes=0).key} {link}"
        record = _KNOWN.setdefault(key, KnownPlans())
        _KNOWN.move_to_end(key)
        while len(_KNOWN) > _PROBLEMS_KEPT:
            _KNOWN.popitem(last=False)
        return record
