"""``auto``: any-time. Keep everything if it fits; else bound, start, repair and search.

Two things run side by side. One thread proves: LP relaxations of a few cuts, the one-cut MILP at
the cut that says most, then several cuts; every MILP plan goes to the search. The other searches,
from nested checkpointing, from everything kept, and from what the first thread finds. Under a
number of evaluations instead of a clock the two run one after the other, so the outcome does not
depend on their speed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from remat.solvers.bounds import floor
from remat.solvers.cold import KERNELS, plans_without_kernels
from remat.solvers.keep import keep_everything
from remat.solvers.offload import Offloads
from remat.solvers.problem import Link
from remat.solvers.prove import Prover
from remat.solvers.registry import PROVEN, Proposal, Request, register
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Found, Searcher
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

_MOMENT: Final = 0.05  # seconds between two looks at what the proving thread found
_GRACE: Final = 1.0  # seconds after the deadline for the only plan that may fit
_ALONE: Final = 0.3  # of the time, for the plan without the link; where there is none:
_SHORT: Final = 0.15
_ALONE_GAP: Final = 5e-4  # at which it is good enough to compare with
_IDLE: Final = 20  # tries in a row that price nothing, before the search is given up


@register("auto")
def solve_auto(request: Request) -> Proposal:
    """The best plan that can be found within the budget before the deadline."""
    return _alone(request) if request.link is None else _with_link(request, request.link)


def _with_link(request: Request, link: Link) -> Proposal:
    """Without the link first; that plan is a candidate, and a start."""
    wider, budget = Structure(request.problem, offloads=True), request.memory_budget
    if budget is not None and floor(request.problem, wider)[0] > budget:
        return least_peak_proposal(request)
    share = _ALONE if budget is None or floor(request.problem)[0] <= budget else _SHORT
    shortened = _for_a_share(request, share)
    if request.max_evaluations is None:  # it goes on below if nothing better leaves
        shortened = replace(shortened, gap=max(request.gap, _ALONE_GAP))
    alone = _alone(shortened)
    assert alone.schedule is not None, "keeping everything is a plan"
    timeline, required = simulate(request.problem, alone.schedule), wider.required_seconds
    fits = budget is None or timeline.peak <= budget
    if budget is None or (fits and timeline.seconds <= required * (1 + PROVEN)):
        return replace(alone, lower_bound=required, infeasible=False)
    offloads = Offloads(request, link, wider, budget, KERNELS.wait(patience(request)))
    found = offloads.run((*request.starts, alone.schedule))
    if offloads.best is None or not offloads.best.offloaded:  # then search on without the link
        again = replace(_for_a_share(request, 1.0), starts=(*request.starts, alone.schedule))
        if request.max_evaluations is None and not offloads.infeasible:
            alone = _alone(again)
        plan = alone.schedule
        if plan is not None and simulate(request.problem, plan).peak <= budget:
            found = replace(found, schedule=plan)
    return replace(found, failures=(*alone.failures, *found.failures))


def _for_a_share(request: Request, share: float) -> Request:
    """The same request without its link, and without transfers, for a share of the time."""
    left, problem = request.seconds_left, request.problem
    deadline = request.deadline if math.isinf(left) else time.monotonic() + share * left
    starts = tuple(Schedule.from_computes(problem, start.computes) for start in request.starts)
    return replace(request, link=None, deadline=deadline, starts=starts)


def _alone(request: Request) -> Proposal:
    structure = Structure(request.problem)
    keep = keep_everything(request.problem, structure)
    budget = request.memory_budget
    if budget is None or simulate(request.problem, keep).peak <= budget:
        return Proposal(keep, structure.required_seconds)
    if floor(request.problem, structure)[0] > budget:
        return least_peak_proposal(request)
    return Auto(request, structure, budget, (keep, *request.starts)).run()


def least_peak_proposal(request: Request) -> Proposal:
    """The plan with the smallest peak that is found before the deadline; then the fastest so."""
    if request.link is not None:
        return _least_with_link(request, request.link)
    structure = Structure(request.problem)
    if not KERNELS.wait(patience(request)):
        over = _clock(request)
        plans = [keep_everything(request.problem, structure)]
        plans += plans_without_kernels(structure, None, over)
        least = min(plans, key=lambda plan: simulate(request.problem, plan).peak)
        return Proposal(least, structure.required_seconds, KERNELS.complaints)
    searcher = Searcher(structure, request.seed)
    effort = Effort(request.deadline, request.max_evaluations)
    plan = least_peak_plan(searcher, effort)
    return Proposal(searcher.schedule(plan), structure.required_seconds)


def _least_with_link(request: Request, link: Link) -> Proposal:
    problem, wider = request.problem, Structure(request.problem, offloads=True)
    alone = least_peak_proposal(_for_a_share(request, _SHORT))
    assert alone.schedule is not None, "keeping everything is a plan"
    ready = KERNELS.wait(patience(request))
    offloads = Offloads(request, link, wider, floor(problem, wider)[0], ready)
    found = offloads.run_least((alone.schedule, keep_everything(problem, wider)))
    return replace(found, failures=(*alone.failures, *found.failures))


def patience(request: Request) -> float | None:
    """Seconds to wait for the kernels; None, however long, where evaluations are counted."""
    return None if request.max_evaluations is not None else 0.8 * request.seconds_left


def _clock(request: Request) -> Callable[[], bool]:
    """True when time is up; a second is granted in any case, to find anything at all."""
    until = max(request.deadline, time.monotonic() + 1.0)
    return lambda: time.monotonic() >= until


def least_peak_plan(searcher: Searcher, effort: Effort) -> Found:
    """Lower the peak with most of the effort, anneal at the peak that was reached with the rest."""
    keep = searcher.found(keep_everything(searcher.problem, searcher.structure))
    assert keep is not None, "keeping everything runs no op twice"
    part = effort.part(0.6)
    target = floor(searcher.problem, searcher.structure)[0]
    least = searcher.lower([*searcher.seeds, keep], target, part)
    effort.charge(part)
    assert least is not None
    return searcher.improve([least], least.peak, effort)


@dataclass
class Auto:
    """One run of ``auto``.

    Attributes:
        starts: plans to begin with; those over the budget are repaired.
        best, least: what the search found, as it sees it: the fastest plan within the budget, and
            while there is none the plan with the smallest peak.
        plan, rank: the schedule to answer with; how far it is over the budget, and its seconds.
        found: plans of the proving thread that the search has not seen yet; ``news`` tells of them.
        proving: the proving thread still works.
        sources: plans over the budget that a new start of the search may be mended from.
    """

    request: Request
    structure: Structure
    budget: int
    starts: Sequence[Schedule]
    bound: float = 0.0
    prover: Prover = field(init=False)
    best: Found | None = None
    least: Found | None = None
    plan: Schedule | None = None
    rank: tuple[float, float] = (math.inf, math.inf)
    found: list[Schedule] = field(default_factory=list)
    news: threading.Event = field(default_factory=threading.Event)
    proving: bool = False
    sources: list[Found] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> Proposal:
        """Prove and search until the deadline, the gap, or a proof of optimality."""
        request = self.request
        self.bound = self.structure.required_seconds
        self.prover = prover = Prover(request, self.structure, self.budget, self._proved, self._gap)
        if request.max_evaluations is not None:
            prover.run()
            self._work()
        else:
            self.proving = True
            thread = threading.Thread(
                target=self._prove, args=(prover,), name="remat prover", daemon=True
            )
            thread.start()
            try:
                searcher = self._work()
            finally:
                prover.stop()
                thread.join()
            self._work_off(searcher)
        self.failures += prover.failures
        return Proposal(self.plan, self.bound, tuple(self.failures), prover.infeasible)

    def _prove(self, prover: Prover) -> None:
        prover.run()
        self.proving = False
        self.news.set()

    def _work(self) -> Searcher | None:
        """Search; the searcher, or None where it is not compiled yet."""
        if not KERNELS.wait(patience(self.request)):
            self.failures += KERNELS.complaints
            self._make_do()
            return None
        searcher = Searcher(self.structure, self.request.seed)
        self._search(searcher)
        self._answer(searcher)
        return searcher

    def _answer(self, searcher: Searcher) -> None:
        plan = self.best or self.least
        if plan is not None:
            self.plan = searcher.schedule(plan)

    def _work_off(self, searcher: Searcher | None) -> None:
        """What the proving thread found while the search ended; mended only where nothing fits."""
        if searcher is None:
            self._consider(self._taken())
            return
        over = self.best is None and bool(self.found)
        for plan in self._arrivals(searcher, grace=_GRACE if over else 0.0):
            self._note(plan)
        self._answer(searcher)

    def _make_do(self) -> None:
        """The best plan that is found without the compiled search."""
        over = _clock(self.request)
        self._consider(self.starts)
        self._consider(plans_without_kernels(self.structure, self.budget, over))
        self._consider(self._taken())
        while self.rank[0] > 0 and self.proving and not (over() or self.prover.infeasible):
            self._wait()
            self._consider(self._taken())

    def _consider(self, plans: Iterable[Schedule]) -> None:
        for plan in plans:
            timeline = simulate(self.request.problem, plan)
            rank = max(0, timeline.peak - self.budget), timeline.seconds
            if rank < self.rank:
                self.rank, self.plan = rank, plan

    def _wait(self) -> None:
        """Until the proving thread has news, or a moment."""
        self.news.wait(_MOMENT)
        self.news.clear()

    def _taken(self) -> list[Schedule]:
        """The plans the proving thread found since this was last asked."""
        with self.lock:
            taken, self.found = self.found, []
        return taken

    def _proved(self, bound: float, plan: Schedule | None) -> None:
        """The proving thread reports a bound, and a plan (whatever it peaks at)."""
        with self.lock:
            self.bound = max(self.bound, bound)
            if plan is not None:
                self.found.append(plan)
        self.news.set()
        self._report()

    def _enough(self, plan: Found | None = None) -> bool:
        """Whether the best plan is within the gap."""
        if plan is not None:
            self._note(plan)
        return self._gap() <= max(self.request.gap, PROVEN)

    def _gap(self) -> float:
        """How far, relatively, the best plan is from the bound; infinite without a plan."""
        best = self.best
        if best is None:
            return math.inf
        return (best.seconds - self.bound) / best.seconds if best.seconds > 0 else 0.0

    def _note(self, plan: Found) -> None:
        if plan.peak <= self.budget and (self.best is None or plan.rank < self.best.rank):
            self.best = plan
            self._report()

    def _report(self) -> None:
        if self.request.progress is not None:
            seconds = None if self.best is None else self.best.seconds
            self.request.progress(seconds, self.bound)

    def _search(self, searcher: Searcher) -> None:
        effort = Effort(self.request.deadline, self.request.max_evaluations)
        fitting = self._first_plans(searcher, effort) or self._keep_looking(searcher, effort)
        if not fitting:
            return
        for plan in fitting:
            self._note(plan)
        self._note(
            searcher.improve(
                fitting,
                self.budget,
                effort,
                sources=self.sources,
                arrivals=lambda: self._arrivals(searcher),
                enough=self._enough,
            )
        )

    def _keep_looking(self, searcher: Searcher, effort: Effort) -> list[Found]:
        """Lower the peak; then try at random and look at arrivals until a plan fits or time is up.

        Where evaluations are counted it also ends once tries cost none: none is left to be made.
        """
        starts = self._all_starts(searcher)
        self.least = searcher.lower(starts, self.budget, effort)
        idle = 0
        while not (effort.over or self.prover.infeasible) and idle <= _IDLE:
            if self.least is not None and self.least.peak <= self.budget:
                return [self.least]
            if arrived := self._arrivals(searcher):
                return arrived
            before = effort.spent
            self.least = searcher.try_again(starts, self.least, self.budget, effort)
            if effort.spent == before and self.request.max_evaluations is not None:
                idle += 1
            elif effort.spent == before:
                self._wait()
        return [self.least] if self.least is not None and self.least.peak <= self.budget else []

    def _all_starts(self, searcher: Searcher) -> list[Found]:
        given = (searcher.found(schedule) for schedule in self.starts)
        return [*searcher.seeds, *(plan for plan in given if plan is not None)]

    def _first_plans(self, searcher: Searcher, effort: Effort) -> list[Found]:
        """Plans that keep the budget: seeds and starts that do, and those that repair mends."""
        every = self._all_starts(searcher)
        fitting = sorted((p for p in every if p.peak <= self.budget), key=lambda plan: plan.rank)[
            :2
        ]
        over = sorted((p for p in every if p.peak > self.budget), key=lambda plan: plan.peak)
        self.sources += [*over[:3], *over[-1:]]
        plans = self._arrivals(searcher)
        for plan in (*fitting, *over[:2], *over[-1:]):
            part = effort.part(0.15)
            most = min((p.seconds for p in plans), default=math.inf) * 1.1
            mended = searcher.workers[0].repair(plan.ops, self.budget, part, most)
            effort.charge(part)
            if mended is not None:
                plans.append(mended)
            elif plan.peak <= self.budget:  # there was no time to polish it
                plans.append(plan)
        return plans

    def _arrivals(self, searcher: Searcher, grace: float = 0.0) -> list[Found]:
        """Plans of the proving thread, mended where they exceed the budget.

        Args:
            grace: seconds that mending may take in any case.
        """
        plans: list[Found] = []
        until = max(self.request.deadline, time.monotonic() + grace)
        for schedule in self._taken():
            plan = searcher.found(schedule)
            part = Effort(until, self.request.max_evaluations)
            if plan is not None:
                self.sources.append(plan)
                mended = searcher.workers[0].repair(plan.ops, self.budget, part)
                if mended is not None:
                    plans.append(mended)
                elif plan.peak <= self.budget:  # there was no time to polish it
                    plans.append(plan)
        return plans
