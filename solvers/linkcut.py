"""The one-cut MILP with a link: what is resident at one moment, what runs again, what comes back.

The class with a link is that of ``onecut.py``, and a forward value may leave: copied out at any
time after it was made, freed after forward has read it for the last time, and in backward brought
back, any number of times. Gradients, tangents and outputs stay.

Variables, besides s and x of ``onecut.py``. o_v = 1: v is not resident at the cut c, and comes back
after it.  d >= 0: seconds lost before c, to recomputation and to waits.  w >= 0: seconds
lost after c that no x counts: waits, and runs after the second.

    minimise    sum t_i x_i + d + w
    subject to  the rows of onecut.py, with s_v + x_p(v) + o_v for s_v + x_p(v)
                sum of a_v o_v over ready_v >= r  <=  T_c - r + d                 for every r
                sum of b_v o_v over due_v <= D    <=  D - T_c + sum t_i x_i + w   for every D

a_v and b_v are the seconds of a copy out and back, latency included. On the clock of the skeleton,
ready_v is when v has been made, T_c when the op at the cut starts, due_v when the first backward op
after c that reads v starts (the end of the step if there is none).

Validity. Take any schedule of the class that fits. Let o_v = 1 where v is away at c and what is
read of it after c came back, not from a second run. Its copy was made after ready_v and was done
before c: all copies of values ready at r or later went through one queue between r and T_c, an
interval that is longer than the skeleton's by at most what was lost before c. Likewise it was back
when the first backward op after c read it; that interval is longer than the skeleton's by the
runs and the waits in it, of which there are no more than after c altogether. What was lost before
and after c is lost by the step. Deferred ops run at a time the skeleton does not fix:
their seconds are added to both intervals.

A value whose copy takes many times the step has no o: the bound is then no larger than that copy.
For a *plan* (``planning``), a second run only counts for those deadlines it comes before, and a
deferred value is not there before it is demanded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from remat.solvers.milp import Model
from remat.solvers.onecut import SCALE, CutAnswer, OneCut
from remat.solvers.problem import Link
from remat.solvers.structure import Structure
from remat.solvers.transfers import Transfers

_ROWS: Final = 60  # deadlines, and ready times, that are stated
_SLOW: Final = 4.0  # a copy that takes so many times the required seconds is not offered
_MOST: Final = 1e6  # times the required seconds: above the sum of all copies, of all waits


@dataclass(frozen=True, slots=True)
class LinkCutAnswer(CutAnswer):
    """What a cut with a link says; ``kept`` and ``away`` are None without a plan."""

    away: frozenset[int] | None = None


def link_cut(
    structure: Structure,
    memory_budget: int,
    cut: int,
    link: Link,
    *,
    time_limit: float = math.inf,
    gap: float = 1e-3,
    nodes: int | None = None,
    relaxed: bool = False,
    planning: bool = False,
    share: float = 1.0,
    start: Transfers | None = None,
) -> LinkCutAnswer:
    """Solve the MILP of this file (its LP relaxation if ``relaxed``) at position ``cut``.

    Args:
        structure: of the class with offloading.
        time_limit, gap, nodes: as in :func:`one_cut`.
        planning: state when recomputation happens. Its bound is no bound of the class.
        start: a known plan, for HiGHS to begin with.
        share: of the link's bandwidth that may be used; less than 1 is for plans only.

    Raises:
        MilpFailure: the solver broke; nothing is known.
    """
    room = memory_budget - int(structure.unavoidable_bytes[cut])
    if room < 0:
        return LinkCutAnswer("infeasible", math.inf)
    began = time.monotonic()
    formulation = _LinkCut(structure, cut, Model(relaxed), link=link, planning=planning)
    formulation.state_demands()
    formulation.limit_memory(room)
    formulation.limit_transfers(share)
    left = time_limit - (time.monotonic() - began)
    known = {} if start is None else formulation.values_of(start)
    found = formulation.model.solve(time_limit=left, gap=gap, nodes=nodes, start=known)
    required = structure.required_seconds
    slowest = formulation.unoffered
    if found.outcome == "infeasible":
        return LinkCutAnswer("infeasible" if math.isinf(slowest) else "unknown", required)
    bound = min(required * (1 + max(0.0, found.bound) / SCALE), max(required, slowest))
    if planning:
        bound = required
    if relaxed or found.outcome == "unknown":
        return LinkCutAnswer(found.outcome, bound)
    kept = formulation.resident_values(found.values)
    away = formulation.away_values(found.values) - kept
    seconds = required * (1 + found.objective / SCALE)
    return LinkCutAnswer(found.outcome, bound, seconds, kept, away)


@dataclass
class _LinkCut(OneCut):
    link: Link = field(kw_only=True)
    planning: bool = field(kw_only=True)
    away: dict[int, int] = field(default_factory=dict)
    unoffered: float = math.inf  # seconds of the shortest copy that was too long to be offered

    def ways(self, v: int) -> list[tuple[int, float]]:
        ways = super().ways(v)
        if not self.structure.may_leave(v):
            return ways
        longest = self.link.seconds(self.problem.values[v].bytes)
        if longest > _SLOW * self.structure.required_seconds:
            self.unoffered = min(self.unoffered, longest)
            return ways
        if v not in self.away:
            self.away[v] = self.model.variable()
        return [*ways, (self.away[v], 1.0)]

    def _resident(self, v: int) -> int:
        """A plan does not count on a deferred value before its op is demanded."""
        if v not in self.resident:
            later = self.planning and self.structure.demanded_at[self.problem.producer[v]]
            self.resident[v] = self.model.variable(upper=float(not later or later <= self.cut))
        return self.resident[v]

    def _seconds_out(self, v: int) -> float:
        return self.link.seconds_out(self.problem.values[v].bytes)

    def _seconds_back(self, v: int) -> float:
        return self.link.seconds_back(self.problem.values[v].bytes)

    @cached_property
    def starts(self) -> list[float]:
        """When each position of the skeleton starts, and the end; deferred ops when demanded."""
        problem, structure = self.problem, self.structure
        seconds = [problem.ops[op].seconds for op in structure.order]
        for op, at in enumerate(structure.demanded_at):
            if 0 <= at < len(seconds):
                seconds[at] += problem.ops[op].seconds
        starts = [0.0]
        for taken in seconds:
            starts.append(starts[-1] + taken)
        return starts

    @cached_property
    def slack(self) -> float:
        """Seconds of ops whose time the skeleton does not fix; a plan takes them as demanded."""
        ops = self.problem.ops
        again = (i for i in range(len(ops)) if self.structure.runs_in_backward(i))
        return 0.0 if self.planning else math.fsum(ops[i].seconds for i in again)

    @cached_property
    def due(self) -> list[int]:
        """For each value, the position after the cut at which it is first read by backward."""
        order, structure = self.structure.order, self.structure
        due = [len(order)] * len(self.problem.values)
        first = max(self.cut + 1, structure.forward_end)
        for at in range(len(order) - 1, first - 1, -1):
            for v in structure.reads[order[at]]:
                due[v] = at
        return due

    @cached_property
    def demanded(self) -> list[int]:
        """For each op, the position after the cut at which its second run is first of use."""
        ops, end = self.problem.ops, len(self.structure.order)
        demanded = [end] * len(ops)
        through = list(self.due)
        for op in range(len(ops) - 1, -1, -1):
            if ops[op].phase == "backward":
                continue
            demanded[op] = min((through[v] for v in ops[op].writes), default=end)
            for v in self.structure.reads[op]:
                through[v] = min(through[v], demanded[op])
        return demanded

    def _deadline(self, v: int) -> int:
        if self.planning and self.due[v] == len(self.structure.order):
            return self.demanded[self.problem.producer[v]]
        return self.due[v]

    def limit_transfers(self, share: float) -> None:
        """Both directions of the link: what is ready late, and what is due early, has to fit."""
        unit = self.structure.required_seconds
        if not self.away or unit <= 0:
            return
        slack = self.slack * (self.cut >= self.structure.forward_end)
        at_cut = self.starts[self.cut]
        ready = {v: self.structure.position[self.problem.producer[v]] for v in self.away}
        lost = self.model.variable(SCALE, upper=_MOST, integer=False)
        copied, later = self._total(), len(self.starts)
        for at in reversed(_some(ready.values())):
            group = [v for v in self.away if at <= ready[v] < later]
            copied = self._add_up(
                copied, [(self.away[v], self._seconds_out(v) / unit) for v in group]
            )
            room = share * max(0.0, at_cut - self.starts[at + 1] + slack)
            self.model.at_most([(copied, 1.0), (lost, -1.0)], room / unit)
            later = at
        self._limit_returns(share)

    def _limit_returns(self, share: float) -> None:
        unit, earlier = self.structure.required_seconds, -1
        waits = self.model.variable(SCALE, upper=_MOST, integer=False)
        copied, again = self._total(), self._total()
        self._add_runs(again, None, () if self.planning else self.again)
        for at in _some(self._deadline(v) for v in self.away):
            group = [v for v in self.away if earlier < self._deadline(v) <= at]
            copied = self._add_up(
                copied, [(self.away[v], self._seconds_back(v) / unit) for v in group]
            )
            if self.planning:
                before, again = again, self._total()
                runs = [op for op in self.again if earlier < self.demanded[op] <= at]
                self._add_runs(again, before, runs)
            room = share * max(0.0, self.starts[at] - self.starts[self.cut] + self.slack)
            row = [(copied, 1.0), (again, -share), (waits, -1.0)]
            self.model.at_most(row, room / unit)
            earlier = at

    def _total(self) -> int:
        """A variable for a sum: rows that add to the one before stay short."""
        return self.model.variable(upper=_MOST, integer=False)

    def _add_up(self, before: int, terms: list[tuple[int, float]]) -> int:
        """A variable that is at least ``before`` and ``terms`` together."""
        total = self._total()
        row = [(total, 1.0), (before, -1.0), *((o, -weight) for o, weight in terms)]
        self.model.at_least(row, 0.0)
        return total

    def _add_runs(self, total: int, before: int | None, ops: Iterable[int]) -> None:
        """Let ``total`` be at most ``before`` and the seconds of the second runs of ``ops``."""
        unit = self.structure.required_seconds
        runs = [(self.again[op], -self.problem.ops[op].seconds / unit) for op in ops]
        carried = [] if before is None else [(before, -1.0)]
        self.model.at_most([(total, 1.0), *carried, *runs], 0.0)

    def values_of(self, plan: Transfers) -> dict[int, float]:
        """The binary variables of a known plan."""
        at = plan.trace.computes.index(self.structure.order[self.cut])
        runs = set(plan.trace.computes[at + 1 :])
        away = {visit.value for visit in plan.visits if visit.first > at}
        values = {x: float(op in runs) for op, x in self.again.items()}
        for v, s in self.resident.items():
            made = self.problem.producer[v] in runs
            values[s] = float(not made and v not in away)
            if v in self.away:
                values[self.away[v]] = float(not made and v in away)
        return values

    def away_values(self, values: tuple[float, ...]) -> frozenset[int]:
        """The values that leave and come back: those a second run does not make anyway."""
        return frozenset(
            v
            for v, o in self.away.items()
            if values[o] > 0.5 and values[self.again[self.problem.producer[v]]] < 0.5
        )


def _some(positions: Iterable[int]) -> list[int]:
    """At most so many different positions, evenly among them, the last included."""
    every = sorted(set(positions))
    step = max(1, math.ceil(len(every) / _ROWS))
    return sorted({*every[::step], every[-1]})
