"""``solve``: one problem, one budget, one solver by name; the judge has the last word."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from remat.solvers import auto as _auto
from remat.solvers import chain as _chain  # noqa: F401  importing a solver's module registers it
from remat.solvers import every_n_layers as _every_n_layers  # noqa: F401
from remat.solvers import greedy as _greedy  # noqa: F401
from remat.solvers import ilp as _ilp  # noqa: F401
from remat.solvers import keep as _keep  # noqa: F401
from remat.solvers import mincut as _mincut  # noqa: F401
from remat.solvers import sqrt as _sqrt  # noqa: F401
from remat.solvers.bounds import floor
from remat.solvers.errors import InvalidOption, InvalidSchedule
from remat.solvers.keep import keep_everything
from remat.solvers.problem import Link, Problem
from remat.solvers.registry import PROVEN, Proposal, Request, find
from remat.solvers.schedule import Schedule, Solution, Status, Timeline
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

_TOLERANCE = 1e-6  # relative, of bounds: what HiGHS is exact to
_LEAST_SHARE: Final = 0.2  # of the time limit, for the least peak where the time is used up

Progress = Callable[[float | None, float], None]


def solve(
    problem: Problem,
    *,
    memory_budget: int | None,
    solver: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.0,
    link: Link | None = None,
    seed: int = 0,
    max_evaluations: int | None = None,
    every_n_layers: int = 1,
    starts: Sequence[Schedule] = (),
    progress: Progress | None = None,
) -> Solution:
    """Find the fastest schedule whose peak fits ``memory_budget``.

    Args:
        memory_budget: bytes, ``Problem.fixed_bytes`` included; None asks for the fastest plan.
        solver: a registered name; ``auto`` does what is best.
        time_limit: seconds after which the best plan so far is returned; finite, unless evaluations
            are counted.
        gap: good enough: stop once (seconds - lower bound) / seconds is at most this.
        link: where values can be offloaded to. ``auto`` then chooses among keeping, recomputing and
            offloading each value, ``every_n_layers`` offloads what it would keep of a layer, others
            plan without it and prove nothing. Bounds then speak of the class with offloading.
        seed, max_evaluations: with ``max_evaluations`` the clock is ignored, and the same seed and
            number give the same plan.
        every_n_layers: for the solver of that name.
        starts: known plans, say of other budgets; the answer is never slower than one that fits.
        progress: called with (seconds of the best plan or None, lower bound) as they improve; not
            always from the calling thread.

    Returns:
        A solution whatever happens on the way: a solver that crashed is noted in ``failures``. A
        budget that is proven too small has status ``infeasible``, one that no plan was found for
        ``not found``; both carry the plan with the least peak that is found, whoever was asked.
        Where that one fits though the solver asked for found none, it is the answer, and
        ``failures`` says so.

    Raises:
        InvalidOption: an unknown solver, or an argument that cannot mean anything.
    """
    _check(memory_budget, time_limit, gap, max_evaluations)
    began = time.monotonic()
    request = Request(
        problem=problem,
        memory_budget=memory_budget,
        deadline=began + time_limit,
        gap=gap,
        seed=seed,
        max_evaluations=max_evaluations,
        every_n_layers=every_n_layers,
        link=link,
        starts=tuple(starts),
        progress=progress,
    )
    judge = _Judge(problem, memory_budget, link)
    proposal = _propose(solver, request, time_limit, judge)
    return judge.solution(proposal, time.monotonic() - began)


def _propose(solver: str, request: Request, time_limit: float, judge: _Judge) -> Proposal:
    """Let the judge hear the starts, the solver's plan, and what is left where that does not fit.

    Returns:
        What the solver claims beside its plan, as far as it holds.
    """
    valid = tuple(start for start in request.starts if judge.hear("start", start))
    request = replace(request, starts=valid)
    proposal = _ask(solver, request, judge)
    if request.link is not None and solver != "auto":  # proven of schedules without transfers
        proposal = replace(proposal, lower_bound=0.0, infeasible=False)
    judge.hear(solver, proposal.schedule)
    if judge.best is None or (not judge.fits and solver == "auto"):
        judge.hear("keep", keep_everything(request.problem))
    if not judge.fits and (solver != "auto" or proposal.infeasible):
        _lower(solver, request, time_limit, judge)
    return proposal


def least_peak(
    problem: Problem,
    *,
    time_limit: float = 10.0,
    seed: int = 0,
    max_evaluations: int | None = None,
    link: Link | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The plan with the smallest peak that can be found; its ``memory_budget`` is that peak.

    Its status is ``feasible``: the plan is not proven to be the fastest with that peak. With a
    link the peak may be smaller, and the plan far slower: what is idle at the peak leaves, and is
    waited for.
    """
    _check(None, time_limit, 0.0, max_evaluations)
    began = time.monotonic()
    request = Request(
        problem=problem,
        memory_budget=0,
        deadline=began + time_limit,
        seed=seed,
        max_evaluations=max_evaluations,
        link=link,
        progress=progress,
    )
    judge = _Judge(problem, 0, link)
    judge.hear("keep", keep_everything(problem))
    judge.hear("auto", _ask_least_peak(request, judge))
    judge.memory_budget = judge.peak
    return judge.solution(Proposal(None), time.monotonic() - began)


def _ask(solver: str, request: Request, judge: _Judge) -> Proposal:
    function = find(solver)
    try:
        return function(request)
    except InvalidOption:
        raise
    except Exception as error:  # noqa: BLE001  the caller gets the best valid plan and the reason
        judge.failures.append(f"{solver}: {_describe(error)}")
        return Proposal(None)


def _ask_least_peak(request: Request, judge: _Judge) -> Schedule | None:
    try:
        proposal = _auto.least_peak_proposal(request)
    except Exception as error:  # noqa: BLE001  a plan is there; what failed is reported with it
        judge.failures.append(f"least_peak: {_describe(error)}")
        return None
    judge.failures += proposal.failures
    return proposal.schedule


def _lower(solver: str, request: Request, time_limit: float, judge: _Judge) -> None:
    """Look for the least peak where no plan fits: with the time left, and a share in any case.

    That plan may fit after all. Then it is the answer, and a note says whose it is not.
    """
    deadline = max(request.deadline, time.monotonic() + _LEAST_SHARE * time_limit)
    judge.hear("auto", _ask_least_peak(replace(request, deadline=deadline), judge))
    if judge.fits:
        judge.failures.append(
            f"{solver}: found no plan within the budget; this is that with the least peak"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass
class _Candidate:
    solver: str
    schedule: Schedule
    timeline: Timeline


class _Judge:
    """Simulates what it hears and remembers the best: the fastest that fits, else the lowest."""

    def __init__(self, problem: Problem, memory_budget: int | None, link: Link | None) -> None:
        self.problem, self.memory_budget, self.link = problem, memory_budget, link
        self.structure = Structure(problem, offloads=link is not None)
        self.best: _Candidate | None = None
        self.failures: list[str] = []

    @property
    def fits(self) -> bool:
        return self.best is not None and self._fits(self.best.timeline)

    @property
    def peak(self) -> int:
        assert self.best is not None
        return self.best.timeline.peak

    def hear(self, solver: str, schedule: Schedule | None) -> bool:
        """Judge a schedule; whether it is one."""
        if schedule is None:
            return False
        try:
            heard = _Candidate(solver, schedule, simulate(self.problem, schedule, self.link))
        except InvalidSchedule as error:
            self.failures.append(f"{solver}: {_describe(error)}")
            return False
        if self.best is None or self._rank(heard) < self._rank(self.best):
            self.best = heard
        return True

    def _fits(self, timeline: Timeline) -> bool:
        return self.memory_budget is None or timeline.peak <= self.memory_budget

    def _rank(self, candidate: _Candidate) -> tuple[float, ...]:
        timeline = candidate.timeline
        if self._fits(timeline):
            return (0, timeline.seconds, timeline.peak)
        return (1, timeline.peak, timeline.seconds)

    def solution(self, proposal: Proposal, solve_time: float) -> Solution:
        assert self.best is not None
        floor_bytes, floor_op = self._floor(proposal)
        bound = self._bound(proposal)
        return Solution(
            problem_key=self.problem.key,
            schedule=self.best.schedule,
            timeline=self.best.timeline,
            memory_budget=self.memory_budget,
            status=self._status(bound, floor_bytes),
            lower_bound=min(bound, self.best.timeline.seconds),
            peak_lower_bound=floor_bytes,
            floor_op=floor_op,
            solver=self.best.solver,
            solve_time=solve_time,
            failures=(*self.failures, *proposal.failures),
        )

    def _bound(self, proposal: Proposal) -> float:
        """Seconds nothing is faster than; a bound that the best plan refutes is noted, not used."""
        assert self.best is not None
        required, seconds = self.structure.required_seconds, self.best.timeline.seconds
        if not self.fits:
            return required
        if proposal.lower_bound > seconds * (1 + _TOLERANCE):
            self.failures.append(
                f"the bound of {proposal.lower_bound:.6g} s is refuted by the plan of "
                f"{seconds:.6g} s from {self.best.solver!r}: a schedule outside the class that "
                "bounds speak of (an early deferred op, a transfer), or a wrong bound"
            )
            return required
        return max(required, proposal.lower_bound)

    def _floor(self, proposal: Proposal) -> tuple[int, int]:
        """(bytes nothing peaks below, op that sets it); cuts that leave no room set no single op.

        A plan that fits refutes whoever said that none does.
        """
        floor_bytes, floor_op = floor(self.problem, self.structure)
        budget = self.memory_budget
        if not proposal.infeasible or budget is None or budget < floor_bytes:
            return floor_bytes, floor_op
        if self.fits:
            self.failures.append(f"{budget} bytes were proven too few, but a plan fits them")
            return floor_bytes, floor_op
        return budget + 1, -1

    def _status(self, bound: float, floor_bytes: int) -> Status:
        assert self.best is not None
        if not self.fits:
            under = self.memory_budget is not None and self.memory_budget < floor_bytes
            return "infeasible" if under else "not found"
        return "optimal" if self.best.timeline.seconds <= bound * (1 + PROVEN) else "feasible"


def _check(
    memory_budget: int | None, time_limit: float, gap: float, max_evaluations: int | None
) -> None:
    whole = memory_budget is None or (
        isinstance(memory_budget, int) and not isinstance(memory_budget, bool)
    )
    if not whole or (memory_budget is not None and memory_budget < 0):
        raise InvalidOption(
            f"memory_budget is {memory_budget!r}; solve takes bytes as an int >= 0, or None"
        )
    if not time_limit >= 0:
        raise InvalidOption(f"time_limit is {time_limit!r}; it must be seconds >= 0")
    if math.isinf(time_limit) and max_evaluations is None:
        raise InvalidOption(
            "time_limit is inf and max_evaluations is None, so that the search would never end; "
            "give seconds, as in time_limit=60.0"
        )
    if not 0 <= gap < 1:
        raise InvalidOption(f"gap is {gap!r}; it must be in [0, 1), as in gap=0.01 for one percent")
    if max_evaluations is not None and max_evaluations < 0:
        raise InvalidOption(f"max_evaluations is {max_evaluations!r}; it must be an int >= 0")
