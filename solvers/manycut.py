"""Several cuts: what is carried from one moment of backward to the next, and what runs in between.

Sets. Cuts c_1 < ... < c_k are positions of backward ops in the skeleton (``structure.py``).
Interval g runs from just after c_g up to and including the op of c_(g+1); interval 0 starts with
backward and interval k ends with it.

Variables. s_vg = 1: value v is resident at c_g (s_v0: when forward ends).  r_ig = 1: op i runs
(again) in interval g.  X_ig, continuous: op i runs (again) at or after interval g.

    minimise    sum t_i r_ig
    subject to  s_vg + r_p(v)g >= 1            v read by a backward op of interval g
                r_ig <= s_ug + r_p(u)g         u read by i
                s_v(g+1) <= s_vg + r_p(v)g
                sum m_v s_vg <= B - U_g        over v not unavoidable and not read at c_g
                X_ig <= sum over h >= g of r_ih
                X_p(v)g + s_vg >= 1            v read by a backward op after c_g
                X_ig <= s_ug + X_p(u)g         u read by i

The rows with X are what one cut says (``onecut.py``); without them the LP relaxation can be weaker
than that of one cut, because it may spread a run over intervals. A deferred op runs first in the
interval of its first demand (not before, there at no cost), and what it writes is not resident
earlier. Values that are always there (outputs of forward) have no variables.

That is where the class of schedules says so; the judge accepts a deferred op that runs earlier, and
such a schedule may beat the bounds of this file (not those of one cut, which hold for it too).

Every schedule of the class within B satisfies the rows with the same meaning of s and r, and takes
the required seconds plus the objective at least: the bounds are valid. Memory between the cuts is
not limited, so a plan may peak above B and must be simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.solvers.milp import Model, Terms
from remat.solvers.onecut import SCALE, CutAnswer
from remat.solvers.retention import schedule_from_retention
from remat.solvers.schedule import Schedule
from remat.solvers.structure import Structure
from remat.solvers.units import MIB

_NO_SIZE_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CutsAnswer(CutAnswer):
    """Like :class:`CutAnswer`.

    Attributes:
        plan: the schedule of the solution, or None.
        variables: how many the model has, X left out.
    """

    plan: Schedule | None = None
    variables: int = 0


def many_cuts(
    structure: Structure,
    memory_budget: int,
    cuts: Sequence[int],
    *,
    time_limit: float = math.inf,
    gap: float = 1e-4,
    nodes: int | None = None,
    relaxed: bool = False,
    most_variables: int = _NO_SIZE_LIMIT,
) -> CutsAnswer | None:
    """Solve the MILP of this file, or its LP relaxation; None if it has too many variables.

    Args:
        cuts: positions of backward ops in the skeleton.
        time_limit: seconds, stating the model included. gap, nodes: when HiGHS may stop.

    Raises:
        MilpFailure: the solver broke; nothing is known.
    """
    cuts = sorted(set(cuts))
    if any(structure.unavoidable_bytes[c] > memory_budget for c in cuts):
        return CutsAnswer("infeasible", math.inf)
    formulation = _ManyCuts(structure, memory_budget, tuple(cuts), Model(relaxed))
    if formulation.size > most_variables:
        return None
    began = time.monotonic()
    formulation.build()
    left = time_limit - (time.monotonic() - began)
    found = formulation.model.solve(time_limit=left, gap=gap, nodes=nodes)
    required = structure.required_seconds
    if found.outcome == "infeasible":
        return CutsAnswer("infeasible", math.inf, variables=formulation.size)
    bound = required * (1 + max(0.0, found.bound - formulation.required) / SCALE)
    if relaxed or found.outcome == "unknown":
        return CutsAnswer(found.outcome, bound, variables=formulation.size)
    return CutsAnswer(
        found.outcome,
        bound,
        required * (1 + (found.objective - formulation.required) / SCALE),
        plan=formulation.schedule(found.values),
        variables=formulation.size,
    )


class _ManyCuts:
    def __init__(
        self, structure: Structure, memory_budget: int, cuts: tuple[int, ...], model: Model
    ) -> None:
        self.structure, self.problem = structure, structure.problem
        self.memory_budget, self.cuts, self.model = memory_budget, cuts, model
        self.ends = (*cuts, len(structure.order) - 1)
        self.resident: dict[tuple[int, int], int] = {}
        self.runs: dict[tuple[int, int], int] = {}
        self.after: dict[tuple[int, int], int] = {}

    @cached_property
    def size(self) -> int:
        """How many variables there will be, X left out."""
        return sum(self.last_use[v] + 2 for v in self.values) + sum(
            self.last_run[i] + 1 for i in self.ops
        )

    @cached_property
    def used(self) -> list[set[int]]:
        """For each interval, the values of forward and deferred ops that its ops read."""
        used: list[set[int]] = [set() for _ in self.ends]
        interval = 0
        for at in range(self.structure.forward_end, len(self.structure.order)):
            while at > self.ends[interval]:
                interval += 1
            op = self.structure.order[at]
            used[interval].update(v for v in self.structure.reads[op] if self._varies(v))
        return used

    def _varies(self, v: int) -> bool:
        """Whether v may be absent: it can be made again and is not an output of forward."""
        producer = self.problem.producer[v]
        if not self.structure.computed_again[v]:
            return False
        deferred = self.problem.ops[producer].phase == "deferred"
        return deferred or self.problem.values[v].output is None

    @cached_property
    def last_use(self) -> dict[int, int]:
        """For each value, the last interval that may want it, itself or what is made of it."""
        last: dict[int, int] = {}
        for interval, values in enumerate(self.used):
            last.update(dict.fromkeys(values, interval))
        for v, value in enumerate(self.problem.values):
            if value.output and self._varies(v):
                last[v] = len(self.ends) - 1
        for op in range(len(self.problem.ops) - 1, -1, -1):
            wanted = max((last.get(v, -1) for v in self.problem.ops[op].writes), default=-1)
            if wanted >= 0 and self.problem.ops[op].phase != "backward":
                for u in self.structure.reads[op]:
                    if self._varies(u):
                        last[u] = max(last.get(u, -1), wanted)
        return last

    @cached_property
    def values(self) -> list[int]:
        return sorted(self.last_use)

    @cached_property
    def last_run(self) -> dict[int, int]:
        """For each op that may run again, the last interval in which that may be of use."""
        last: dict[int, int] = {}
        for v in self.values:
            op = self.problem.producer[v]
            last[op] = max(last.get(op, -1), self.last_use[v])
        return last

    @cached_property
    def ops(self) -> list[int]:
        return sorted(self.last_run)

    def first_interval(self, op: int) -> int:
        """Where a deferred op runs first; -1 for a forward op."""
        at = self.structure.demanded_at[op]
        if at < 0:
            return -1
        return next((g for g, end in enumerate(self.ends) if at <= end), len(self.ends) - 1)

    def build(self) -> None:
        """State variables and rows."""
        for op in self.ops:
            self._add_runs(op)
        for v in self.values:
            first = self.first_interval(self.problem.producer[v])
            first = first if self.problem.values[v].keepable else 0
            for g in range(max(0, first + 1), self.last_use[v] + 1):
                self.resident[v, g] = self.model.variable()
        for g in range(len(self.ends)):
            self._state_interval(g)
            if g > 0:
                self._limit_memory(g)
                self._state_after(g)

    def _cost(self, op: int) -> float:
        return self.problem.ops[op].seconds / max(self.structure.required_seconds, 1e-300) * SCALE

    @cached_property
    def required(self) -> float:
        """The part of the objective that the required seconds contain."""
        return math.fsum(self._cost(op) for op in sorted(self.structure.required_again))

    def _add_runs(self, op: int) -> None:
        first = self.first_interval(op)
        again = self.problem.ops[op].rerunnable
        cost = self._cost(op)
        for g in range(max(0, first), self.last_run[op] + 1):
            if again or g == first:
                self.runs[op, g] = self.model.variable(0.0 if g == first else cost)

    def _has(self, v: int, g: int) -> Terms:
        """Terms that sum to at least 1 if v is there in interval g."""
        terms = []
        if (v, g) in self.resident:
            terms.append((self.resident[v, g], 1.0))
        run = self.runs.get((self.problem.producer[v], g))
        return [*terms, (run, 1.0)] if run is not None else terms

    def _state_interval(self, g: int) -> None:
        for v in sorted(self.used[g]):
            self.model.at_least(self._has(v, g), 1)
        for v in self.values:
            if self.problem.values[v].output and g == len(self.ends) - 1:
                self.model.at_least(self._has(v, g), 1)
            if (v, g + 1) in self.resident:
                self.model.at_least([*self._has(v, g), (self.resident[v, g + 1], -1.0)], 0)
        for op in self.ops:
            if (op, g) in self.runs:
                for u in self.structure.reads[op]:
                    if self._varies(u):
                        self.model.at_least([*self._has(u, g), (self.runs[op, g], -1.0)], 0)

    def _limit_memory(self, g: int) -> None:
        cut = self.cuts[g - 1]
        operands = set(self.structure.reads[self.structure.order[cut]])
        charged = [
            (s, self.problem.values[v].bytes / MIB)
            for v in self.values
            if (s := self.resident.get((v, g))) is not None
            and v not in operands
            and not self.structure.holds(v, cut)
        ]
        room = self.memory_budget - int(self.structure.unavoidable_bytes[cut])
        self.model.at_most(charged, room / MIB)

    def _state_after(self, g: int) -> None:
        wanted = {v for used in self.used[g:] for v in used}
        for op in self.ops:
            runs = [
                (self.runs[op, h], 1.0)
                for h in range(g, self.last_run[op] + 1)
                if (op, h) in self.runs
            ]
            if runs:
                self.after[op, g] = self.model.variable(integer=False)
                self.model.at_least([*runs, (self.after[op, g], -1.0)], 0)
        for v in self.values:
            if v in wanted:
                self.model.at_least(self._has_after(v, g), 1)
        for op in self.ops:
            if (op, g) in self.after:
                for u in self.structure.reads[op]:
                    if self._varies(u):
                        self.model.at_least([*self._has_after(u, g), (self.after[op, g], -1.0)], 0)

    def _has_after(self, v: int, g: int) -> Terms:
        resident = self.resident.get((v, g))
        after = self.after.get((self.problem.producer[v], g))
        return [(variable, 1.0) for variable in (resident, after) if variable is not None]

    def schedule(self, values: tuple[float, ...]) -> Schedule:
        """The plan of a solution, as a retention map with one group an interval."""
        kept: list[set[int]] = [set() for _ in self.ends]
        for (v, g), s in self.resident.items():
            if values[s] > 0.5:
                kept[g].add(v)
        start = self.structure.forward_end
        group_of = [
            sum(at > cut for cut in self.cuts) for at in range(start, len(self.structure.order))
        ]
        return schedule_from_retention(self.problem, kept, group_of, self.structure)
