"""Keep, recompute and offload together: what ``auto`` does after its search where there is a link.

1. LP relaxations of ``linkcut.py`` at the fullest moments bound the seconds of the class.
2. Its MILP, at the moment that says most, chooses what is kept, recomputed and offloaded.
3. ``transfers.py`` turns that into a schedule; where it peaks over the budget (another moment than
   the cut's) or waits for transfers, 4 mends it, and a tighter or slower MILP is tried.
4. With the transfers fixed as windows (``windows.py``), the search of ordinary problems moves the
   recomputations; the plan is scheduled again, with the windows it then has.

Where no plan fits otherwise, values leave one after the other, and computation waits for them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from remat.solvers.bounds import floor
from remat.solvers.keep import keep_everything
from remat.solvers.linkcut import link_cut
from remat.solvers.milp import NODES, MilpFailure
from remat.solvers.onecut import promising_cuts, schedule_of_cut
from remat.solvers.problem import Link, Problem
from remat.solvers.registry import PROVEN, Proposal, Request
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Searcher
from remat.solvers.structure import Structure
from remat.solvers.transfers import Trace, Transfers, with_transfers
from remat.solvers.windows import windowed

_SCANNED: Final = 3  # cuts whose LP relaxation is solved
_SCAN_SHARE: Final = 0.1  # of the time, after which the scan ends
_MILP_SHARE: Final = 0.5  # of the time left, for the first MILP
_AGAIN_SHARE: Final = 0.3  # for each one after it
_ATTEMPTS: Final = 4  # MILPs
_EXCESSES: Final = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)  # times the bytes over the budget that leave
_COARSE: Final = 5e-2  # gap of the MILP, of the added time: the bound is the LP's anyway
_FINE: Final = 1e-2  # of a second one, if there is time
_POLISH_SHARE: Final = 0.3  # of the effort left, for each search with fixed windows
_STALE: Final = 3  # searches in a row that find nothing
_WAITS: Final = 1e-4  # of the required seconds: a plan that waits longer is planned again
_LESS: Final = 0.9  # of the link's bandwidth, then
_LEAD: Final = 0.02  # of the required seconds that reloads start ahead where there is room
_MOMENT: Final = 0.05  # seconds in which nothing is begun any more
_GRACE: Final = 1.0  # seconds after the deadline for the only plan that may fit


def least_peak_with_offload(problem: Problem) -> int:
    """Bytes that a plan peaks at if all that is idle leaves and may be waited for. Takes a moment.

    Nothing is computed again, and the link is endless: it says what offloading could make of the
    least peak, not how fast.
    """
    structure, endless = Structure(problem, offloads=True), Link(math.inf, math.inf)
    search = Offloads(
        Request(problem, 0, link=endless), endless, structure, floor(problem, structure)[0]
    )
    search.squeeze(search.price(Trace.of(structure, keep_everything(problem, structure).computes)))
    assert search.least is not None, "keeping everything is a plan"
    return search.least.peak


@dataclass
class Offloads:
    """One search for plans with transfers, within one budget.

    Attributes:
        structure: of the class with offloading.
        searches: whether the compiled search is ready.
        best: the fastest plan within the budget; ``least``: that with the smallest peak.
        bound: seconds that no plan of the class within the budget beats.
        infeasible: proven: no plan of the class fits the budget.
    """

    request: Request
    link: Link
    structure: Structure
    budget: int
    searches: bool = True
    best: Transfers | None = None
    least: Transfers | None = None
    bound: float = 0.0
    infeasible: bool = False
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bound = self.structure.required_seconds
        self.effort = Effort(self.request.deadline, self.request.max_evaluations)

    def run(self, starts: Sequence[Schedule]) -> Proposal:
        """Search from the MILP, and from known plans."""
        for start in starts:
            away = [step.index for step in start.steps if step.kind == "offload"]
            back = Counter(step.index for step in start.steps if step.kind == "reload")
            often = [v for v, times in back.items() if times > 1]
            self.price(Trace.of(self.structure, start.computes), away, often)
        self._plan()
        return self.proposal()

    def _plan(self) -> None:
        """Bound, plan by a coarse MILP, search around its transfers; once more, by a finer one."""
        try:
            cuts = self._ranked_cuts() if self.structure.order else []  # else deferred ops alone
            self._plan_by_excess()
            for gap in (_FINE,) if self._counted else (_COARSE, _FINE):
                if cuts and not self._done:
                    self._plan_by_cut(cuts[0], gap)
                if self.best is None and self.least is not None and not self.infeasible:
                    self.squeeze(self.least)
                self._polish()
        except MilpFailure as failure:
            self.failures.append(str(failure))

    def run_least(self, starts: Sequence[Schedule]) -> Proposal:
        """The smallest peak that values leaving one by one reach; then the fastest plan with it."""
        for start in starts:
            self.squeeze(self.price(Trace.of(self.structure, start.computes)))
        assert self.least is not None, "there is a plan to start from"
        self.budget, self.best = self.least.peak, self.least
        self.price(self.least.trace, self.least.offloaded, self.least.returning)
        self._plan()
        return self.proposal()

    def proposal(self) -> Proposal:
        """The best plan so far, its reloads moved ahead where there is room."""
        plan = self.best or self.least
        if plan is None:
            return Proposal(None, self.bound, tuple(self.failures), self.infeasible)
        ahead = self.price(
            plan.trace,
            plan.offloaded,
            plan.returning,
            lead=_LEAD * self.structure.required_seconds,
        )
        safe = ahead.peak <= self.budget and ahead.seconds <= plan.seconds * (1 + PROVEN)
        schedule = (ahead if safe else plan).schedule()
        return Proposal(schedule, self.bound, tuple(self.failures), self.infeasible)

    def price(
        self,
        trace: Trace,
        offloaded: Collection[int] = (),
        returning: Collection[int] = (),
        *,
        lead: float = 0.0,
    ) -> Transfers:
        """Schedule a plan, and remember it where it is better."""
        plan = with_transfers(
            trace, offloaded, self.link, self.budget, returning=returning, lead=lead
        )
        fits = plan.peak <= self.budget
        if fits and (self.best is None or plan.rank < self.best.rank):
            self.best = plan
            if self.request.progress is not None:
                self.request.progress(plan.seconds, self.bound)
        if self.least is None or (plan.peak, plan.seconds) < (self.least.peak, self.least.seconds):
            self.least = plan
        return plan

    @property
    def _counted(self) -> bool:
        return self.request.max_evaluations is not None

    def _limit(self, share: float) -> float:
        return math.inf if self._counted else self.request.seconds_left * share

    @property
    def _done(self) -> bool:
        if self.infeasible or (not self._counted and self.request.seconds_left < _MOMENT):
            return True
        return self.best is not None and self.best.seconds <= self.bound / (
            1 - max(self.request.gap, PROVEN)
        )

    def _plan_by_cut(self, cut: int, gap: float) -> None:
        """Plans of the MILP; tighter where the last peaked too high, less of the link if slow."""
        target, share = self.budget, 1.0
        for attempt in range(_ATTEMPTS):
            if self._done:
                return
            answer = link_cut(
                self.structure,
                target,
                cut,
                self.link,
                time_limit=self._limit(_AGAIN_SHARE if attempt else _MILP_SHARE),
                gap=gap,
                nodes=NODES if self._counted else None,
                planning=True,
                share=share,
                start=self.best,
            )
            if answer.kept is None or answer.away is None:
                return
            chosen = schedule_of_cut(self.structure, cut, answer.kept | answer.away)
            plan = self.price(Trace.of(self.structure, chosen.computes), answer.away)
            if plan.peak > self.budget:
                self._mend(plan)
            over = max(0, plan.peak - self.budget)
            slow = plan.waits > _WAITS * self.structure.required_seconds
            if not over and not slow:
                return
            target -= over
            share *= _LESS if slow else 1.0

    def _plan_by_excess(self) -> None:
        """The values that stay away longest leave, as many as the peak is over the budget, or more.

        Nothing is computed again. Where the link can carry that, no MILP is needed.
        """
        keep = keep_everything(self.structure.problem, self.structure)
        trace = Trace.of(self.structure, keep.computes)
        values, excess = self.structure.problem.values, int(trace.used.max(initial=0)) - self.budget
        away = {
            v: trace.clock[stay.readers[0]] - trace.clock[stay.last_forward + 1]
            for v, stay in trace.stays.items()
        }
        longest = sorted(away, key=lambda v: (-away[v], v))
        total = list(accumulate(values[v].bytes for v in longest))
        for times in _EXCESSES:
            if self._done or not total:
                return
            count = bisect_left(total, times * excess) + 1
            plan = self.price(trace, longest[:count])
            if count >= len(longest) or (plan.peak <= self.budget and plan.waits <= 0.0):
                return

    def _ranked_cuts(self) -> list[int]:
        """The fullest moments, that with the highest LP bound first."""
        allowed, began = self.request.seconds_left, time.monotonic()
        bounds: list[tuple[float, int]] = []
        for cut in promising_cuts(self.structure, _SCANNED):
            answer = link_cut(
                self.structure,
                self.budget,
                cut,
                self.link,
                time_limit=self._limit(_MILP_SHARE),
                relaxed=True,
            )
            if answer.outcome == "infeasible":
                self.infeasible = True
            else:
                self.bound = max(self.bound, answer.lower_bound)
            bounds.append((-answer.lower_bound, cut))
            slow = not self._counted and time.monotonic() - began > _SCAN_SHARE * allowed
            if self._done or slow:
                break
        return [cut for _, cut in sorted(bounds)]

    def _mend(self, plan: Transfers) -> None:
        """Evict what one cut does not see, the transfers fixed; price what comes of it."""
        target = self.budget
        for _ in range(_ATTEMPTS):
            if not self.searches or self._done or target <= 0:
                return
            mended = self._search(plan, target, self.effort.part(_POLISH_SHARE), improve=False)
            if mended is None or mended.peak <= self.budget:
                return
            target -= mended.peak - self.budget

    def _polish(self) -> None:
        """Search with the transfers of the best plan fixed, until that finds nothing new."""
        stale, target = 0, self.budget
        least = self.structure.required_seconds * (1 + PROVEN)
        while self.searches and self.best is not None and stale < _STALE:
            alone = not self.best.offloaded or self.best.trace.clock[-1] <= least
            if alone or self._done or self.effort.over:
                return
            before = self.best
            found = self._search(before, target, self.effort.part(_POLISH_SHARE), improve=True)
            stale = 0 if self.best is not before else stale + 1
            if found is not None and found.peak > self.budget:
                target -= found.peak - self.budget

    def _search(
        self, plan: Transfers, target: int, part: Effort, *, improve: bool
    ) -> Transfers | None:
        """Move recomputations around the transfers of ``plan``; None if ``target`` is missed."""
        fixed = windowed(plan)
        searcher = Searcher(Structure(fixed.problem), self.request.seed)
        start = searcher.found(Schedule.from_computes(fixed.problem, fixed.computes))
        if start is not None and start.peak > target:
            start = searcher.workers[0].repair(start.ops, target, part)
        if start is not None and improve:
            start = searcher.improve([start], target, part)
        self.effort.charge(part)
        if start is None:
            return None
        computes = fixed.restore(int(op) for op in start.ops)
        return self.price(Trace.of(self.structure, computes), plan.offloaded, plan.returning)

    def squeeze(self, plan: Transfers) -> None:
        """Let what stands idle at the peak leave, until the budget is kept or nothing is idle."""
        away, returning = set(plan.offloaded), set(plan.returning)
        values = self.structure.problem.values
        until = max(self.request.deadline, time.monotonic() + _GRACE)
        while plan.peak > self.budget and (self._counted or time.monotonic() < until):
            at = int(plan.used.argmax())
            over = int(plan.used[at]) - self.budget
            idle = self._idle(plan.trace, at, away, returning)
            if not idle:
                return
            for v in sorted(idle, key=lambda v: (-values[v].bytes, v)):
                (returning if v in away else away).add(v)
                over -= values[v].bytes
                if over <= 0:
                    break
            plan = self.price(plan.trace, away, returning)

    @staticmethod
    def _idle(trace: Trace, at: int, away: set[int], returning: set[int]) -> list[int]:
        """The values there at a position that neither read them nor has them on the way."""
        return [
            v
            for v, stay in trace.stays.items()
            if stay.last_forward < at < stay.readers[-1]
            and at not in stay.readers
            and (v not in away or (v not in returning and at > stay.readers[0]))
        ]
