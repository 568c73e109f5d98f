"""``ilp``: integer programs alone, no search; exact where the problem is small.

First one cut (``onecut.py``), then several (``manycut.py``): more of them while HiGHS can be
expected to finish, up to one at every backward op. Memory is limited at the cuts only, so the
answer is simulated: if the plan of an exactly solved model keeps the budget, its bound proves it
optimal. Where it does not, the model is solved again with less memory at the cuts, which gives
plans but no proof. On large problems what one cut says is repaired by evictions.
"""

from __future__ import annotations

import math
from typing import Final

from remat.solvers.bounds import floor
from remat.solvers.cold import KERNELS
from remat.solvers.keep import keep_everything
from remat.solvers.manycut import many_cuts
from remat.solvers.milp import NODES, MilpFailure
from remat.solvers.onecut import CutAnswer, one_cut, promising_cuts, schedule_of_cut
from remat.solvers.registry import PROVEN, Proposal, Request, register
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Searcher
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

_VARIABLES: Final = 6_000  # binaries that HiGHS handles in about a minute
_CUT_COUNTS: Final = (2, 4, 8, 16, 32, 64)
_TIGHTENINGS: Final = 6
_MENDING: Final = 1_000_000  # evaluations, where the clock counts


@register("ilp")
def solve_ilp(request: Request) -> Proposal:
    """The plan of the largest model that can be solved in time."""
    structure = Structure(request.problem)
    keep = keep_everything(request.problem, structure)
    budget = request.memory_budget
    if budget is None or simulate(request.problem, keep).peak <= budget:
        return Proposal(keep, structure.required_seconds)
    if floor(request.problem, structure)[0] > budget:
        return Proposal(keep, structure.required_seconds)
    run = _Ilp(request, structure, budget, keep)
    try:
        run.one()
        run.several()
        run.tighten()
    except MilpFailure as failure:
        run.failures.append(str(failure))
    run.mend()
    return Proposal(run.best, run.bound, tuple(run.failures), run.infeasible)


class _Ilp:
    def __init__(self, request: Request, structure: Structure, budget: int, keep: Schedule) -> None:
        self.request, self.structure, self.budget = request, structure, budget
        self.bound = structure.required_seconds
        self.best, self.rank = keep, self._rank(keep)
        self.failures: list[str] = []
        self.infeasible = False  # a cut proved that nothing fits the budget
        self.cuts: list[int] = []

    def _rank(self, plan: Schedule) -> tuple[int, float]:
        timeline = simulate(self.request.problem, plan)
        return max(0, timeline.peak - self.budget), timeline.seconds

    def _hear(self, answer: CutAnswer, plan: Schedule | None) -> None:
        """What a model of the whole budget says."""
        if answer.outcome == "infeasible":
            self.infeasible = True
        else:
            self.bound = max(self.bound, answer.lower_bound)
        self._keep(plan)

    def _keep(self, plan: Schedule | None) -> None:
        if plan is not None and (rank := self._rank(plan)) < self.rank:
            self.best, self.rank = plan, rank

    @property
    def done(self) -> bool:
        """Proven optimal or impossible, within the gap, or out of time."""
        close = self.rank[1] - self.bound <= max(self.request.gap, PROVEN) * self.rank[1]
        out_of_time = not self.counted and self.request.seconds_left < 0.1
        return self.infeasible or out_of_time or (self.rank[0] == 0 and close)

    @property
    def counted(self) -> bool:
        return self.request.max_evaluations is not None

    def _limit(self, share: float) -> float:
        return math.inf if self.counted else self.request.seconds_left * share

    def one(self) -> None:
        """One cut, where keeping everything peaks."""
        if not self.structure.order:  # deferred ops alone: there is no moment to cut at
            return
        cut = promising_cuts(self.structure, 1)[0]
        answer = one_cut(
            self.structure,
            self.budget,
            cut,
            time_limit=self._limit(0.4),
            gap=1e-6,
            nodes=NODES if self.counted else None,
        )
        kept = answer.kept
        plan = None if kept is None else schedule_of_cut(self.structure, cut, kept)
        self._hear(answer, plan)

    def several(self) -> None:
        """More and more cuts, in the end one at every backward op, while the model stays small."""
        start, end = self.structure.forward_end, len(self.structure.order)
        for count in (*_CUT_COUNTS, end - start):
            if self.done or count > end - start:
                continue
            cuts = [start + (end - start) * k // count for k in range(count)]
            if not self._solve(cuts, self.budget):
                return
            self.cuts = cuts

    def tighten(self) -> None:
        """Less memory at the cuts than there is, until the plan keeps the budget between them."""
        lowest = max((int(self.structure.unavoidable_bytes[c]) for c in self.cuts), default=0)
        budget = self.budget
        for _ in range(_TIGHTENINGS):
            if self.done or not self.cuts or self.rank[0] == 0:
                return
            budget = max(lowest, budget - max(1, self.rank[0]))
            if not self._solve(self.cuts, budget) or budget == lowest:
                return

    def _solve(self, cuts: list[int], budget: int) -> bool:
        answer = many_cuts(
            self.structure,
            budget,
            cuts,
            time_limit=self._limit(0.5),
            gap=1e-9,
            nodes=NODES if self.counted else None,
            most_variables=_VARIABLES,
        )
        if answer is None:
            return False
        if budget == self.budget:
            self._hear(answer, answer.plan)
        else:  # a smaller budget proves nothing
            self._keep(answer.plan)
        return answer.outcome != "unknown"

    def mend(self) -> None:
        """Evict until the budget is kept."""
        limit = None if self.counted else self.request.seconds_left + 1
        if self.rank[0] == 0 or self.infeasible:
            return
        if not KERNELS.wait(limit):
            self.failures += KERNELS.complaints
            return
        searcher = Searcher(self.structure, self.request.seed)
        plan = searcher.found(self.best)
        most = self.request.max_evaluations
        effort = Effort(math.inf, _MENDING if most is None else most)
        mended = plan and searcher.workers[0].repair(plan.ops, self.budget, effort)
        if mended:
            self._keep(searcher.schedule(mended))
