"""Lower bounds from cuts, cheapest first, and the plans that come with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from remat.solvers.manycut import many_cuts
from remat.solvers.milp import NODES, MilpFailure
from remat.solvers.onecut import (
    CutAnswer,
    default_bytes,
    one_cut,
    promising_cuts,
    schedule_of_cut,
)
from remat.solvers.registry import PROVEN, Request
from remat.solvers.schedule import Schedule
from remat.solvers.structure import Structure

_SCANNED: Final = 3  # cuts whose LP relaxation is solved
_SCAN_SHARE: Final = 0.1  # of the time, after which the scan ends
_SCANNED_SIZE: Final = 4_000  # ops and values above which the fullest moment is taken unscanned
_MILP_SHARE: Final = 0.7
_SMALL_GAP: Final = 1e-4  # several cuts are not worth their time where less than this is open
_OTHERS_SHARE: Final = 0.7  # of the time must be left for the MILP of a second cut
_CUT_COUNTS: Final = (4, 8, 16, 32)
_LP_VARIABLES: Final = 60_000
_PACE: Final = 5e-5  # seconds a variable, until it was measured
_MILP_VARIABLES: Final = 2_000


@dataclass
class Prover:
    """Runs the ladder of bounds for one budget.

    Attributes:
        report: told of every bound (seconds) and of every plan.
        gap: how far, relatively, the best plan so far is from the best bound.
        infeasible: a cut proved that no schedule of the class fits the budget.
    """

    request: Request
    structure: Structure
    budget: int
    report: Callable[[float, Schedule | None], None]
    gap: Callable[[], float]
    failures: list[str] = field(default_factory=list)
    stopped: bool = False
    infeasible: bool = False
    pace: float = _PACE

    def __post_init__(self) -> None:
        self.allowed = self.time_left

    def run(self) -> None:
        """Climb until the deadline, the gap, or the end of the ladder. Never raises."""
        try:
            self._climb()
        except MilpFailure as failure:
            self.failures.append(str(failure))
        except Exception as error:  # noqa: BLE001  a proof that fails must not cost the plan
            self.failures.append(f"bounds: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Start no further model."""
        self.stopped = True

    @property
    def counted(self) -> bool:
        return self.request.max_evaluations is not None

    @property
    def done(self) -> bool:
        if self.stopped or self.infeasible or self.gap() <= max(self.request.gap, PROVEN):
            return True
        return not self.counted and self.time_left < 0.2

    @property
    def time_left(self) -> float:
        return self.request.seconds_left

    def _limit(self, share: float) -> float:
        return math.inf if self.counted else self.time_left * share

    def _climb(self) -> None:
        if not self.structure.order:  # deferred ops alone: there is no moment to cut at
            return
        cuts = self._ranked_cuts()
        if not self.infeasible:
            self._one(cuts[0])
        if self.counted:
            return
        for cut in cuts[1:]:
            if self.done or self.time_left < _OTHERS_SHARE * self.allowed:
                break
            self._one(cut)
        for count in _CUT_COUNTS:
            if self.done or self.gap() <= _SMALL_GAP:
                return
            self._several(self._spread(count))

    def _one(self, cut: int) -> None:
        began = time.monotonic()
        answer = one_cut(
            self.structure,
            self.budget,
            cut,
            time_limit=self._limit(_MILP_SHARE),
            nodes=NODES if self.counted else None,
        )
        plan = None if answer.kept is None else schedule_of_cut(self.structure, cut, answer.kept)
        self._tell(answer, plan)
        size = len(self.structure.problem.values) + len(self.structure.problem.ops)
        self.pace = max(self.pace, (time.monotonic() - began) / max(1, size))

    def _ranked_cuts(self) -> list[int]:
        """The fullest moments, that with the highest LP bound first."""
        size = len(self.structure.problem.values) + len(self.structure.problem.ops)
        if size > _SCANNED_SIZE:
            return promising_cuts(self.structure, 1)
        bounds: list[tuple[float, int]] = []
        for cut in promising_cuts(self.structure, _SCANNED):
            began = time.monotonic()
            answer = one_cut(
                self.structure, self.budget, cut, time_limit=self._limit(0.3), relaxed=True
            )
            self._tell(answer, None)
            self.pace = max(_PACE, 3 * (time.monotonic() - began) / max(1, size))
            bounds.append((-answer.lower_bound, cut))
            slow = not self.counted and self.allowed - self.time_left > _SCAN_SHARE * self.allowed
            if self.done or slow:
                break
        return [cut for _, cut in sorted(bounds)]

    def _several(self, cuts: list[int]) -> None:
        began = time.monotonic()
        most = _LP_VARIABLES
        if not self.counted:
            most = min(most, int(0.5 * self.time_left / self.pace))
        relaxed = many_cuts(
            self.structure,
            self.budget,
            cuts,
            time_limit=self._limit(0.9),
            relaxed=True,
            most_variables=most,
        )
        if relaxed is None:
            return
        self._tell(relaxed, None)
        self.pace = (time.monotonic() - began) / max(1, relaxed.variables)
        if self.done:
            return
        exact = many_cuts(
            self.structure,
            self.budget,
            cuts,
            time_limit=self._limit(0.4),
            nodes=NODES if self.counted else None,
            most_variables=min(most, _MILP_VARIABLES),
        )
        if exact is not None:
            self._tell(exact, exact.plan)

    def _tell(self, answer: CutAnswer, plan: Schedule | None) -> None:
        if answer.outcome == "infeasible":
            self.infeasible = True
        else:
            self.report(answer.lower_bound, plan)

    def _spread(self, count: int) -> list[int]:
        """The fullest moments of ``count`` stretches of backward, kept or unavoidable bytes."""
        start = self.structure.forward_end
        kept = np.array(default_bytes(self.structure))
        unavoidable = self.structure.unavoidable_bytes
        chosen = {start + int(np.argmax(kept[start:])), start + int(np.argmax(unavoidable[start:]))}
        for k, stretch in enumerate(np.array_split(np.arange(start, len(kept)), count)):
            if len(stretch):
                full = kept if k < count // 2 else unavoidable
                chosen.add(int(stretch[np.argmax(full[stretch])]))
        return sorted(chosen)
