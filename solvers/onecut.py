"""The one-cut MILP: decide what is resident at one moment, and what runs again after it.

Sets. A *cut* is a position c of the skeleton (``structure.py``): the moment its op runs. F are the
ops that may run again (forward, deferred); N_c the values they write and backward ops read after c.

Variables. s_v = 1: value v is resident at c.  x_i = 1: op i runs (again) after c.

    minimise    sum t_i x_i
    subject to  s_v + x_p(v) >= 1        v in N_c            it is there or is made, p(v) its op
                x_i <= s_u + x_p(u)      i in F, reading u   so is what making it reads
                sum m_v s_v <= B - U_c   over v not unavoidable and not read at c

U_c are the unavoidable bytes at c, with operands and workspace of its op. What is unavoidable at c,
is read by its op, takes no bytes, or is only computed after c (c in forward) is there for free.

Validity. From any schedule of the class that fits B take s_v and x_i as they are: the rows hold,
and the schedule takes at least the required seconds plus the objective. A deferred op whose first
demand is after c may run after c for the first time, so its x costs nothing; if it is demanded by c
it has run before, so x is a second run. Nor does an op whose second run is required anyway cost
anything here. So the dual bound of the MILP, and the optimum of its LP
relaxation, bound the seconds of every schedule of the class from below.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final

from remat.solvers.keep import keep_everything
from remat.solvers.milp import Model, Outcome
from remat.solvers.problem import Problem
from remat.solvers.retention import saved_by_default, schedule_from_retention
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.units import MIB

SCALE: Final = 1e4  # objective of one whole step: makes HiGHS's absolute tolerances relative


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """What a cut says.

    Attributes:
        outcome: ``infeasible`` proves that no schedule of the class fits the budget.
        lower_bound: seconds of the whole step that no schedule within the budget beats.
        seconds: of the plan, as the cut sees it (infinite without a plan).
        kept: values resident at the cut in the plan; None without a plan.
    """

    outcome: Outcome
    lower_bound: float
    seconds: float = math.inf
    kept: frozenset[int] | None = None


def one_cut(
    structure: Structure,
    memory_budget: int,
    cut: int,
    *,
    time_limit: float = math.inf,
    gap: float = 1e-3,
    nodes: int | None = None,
    relaxed: bool = False,
) -> CutAnswer:
    """Solve the MILP of this file (its LP relaxation if ``relaxed``) at position ``cut``.

    Args:
        time_limit: seconds, stating the model included.
        gap: relative gap, of the added time, at which HiGHS may stop; ``nodes``: after so many.

    Raises:
        MilpFailure: the solver broke; nothing is known.
    """
    room = memory_budget - int(structure.unavoidable_bytes[cut])
    if room < 0:
        return CutAnswer("infeasible", math.inf)
    began = time.monotonic()
    formulation = OneCut(structure, cut, Model(relaxed))
    formulation.state_demands()
    formulation.limit_memory(room)
    left = time_limit - (time.monotonic() - began)
    found = formulation.model.solve(time_limit=left, gap=gap, nodes=nodes)
    required = structure.required_seconds
    if found.outcome == "infeasible":
        return CutAnswer("infeasible", math.inf)
    bound = required * (1 + max(0.0, found.bound) / SCALE)
    if relaxed or found.outcome == "unknown":
        return CutAnswer(found.outcome, bound)
    kept = formulation.resident_values(found.values)
    return CutAnswer(found.outcome, bound, required * (1 + found.objective / SCALE), kept)


@dataclass
class OneCut:
    """The model at one cut; ``linkcut.py`` adds offloading to it."""

    structure: Structure
    cut: int
    model: Model
    resident: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problem: Problem = self.structure.problem
        self.operands = frozenset(self.structure.reads[self.structure.order[self.cut]])

    def state_demands(self) -> None:
        """A needed value is resident or its op runs again; so, in turn, for what that op reads."""
        first = max(self.cut + 1, self.structure.forward_end)
        read = {v for op in self.structure.order[first:] for v in self.structure.reads[op]}
        for v in sorted(read):
            if self.structure.computed_again[v] and not self._free(v):
                self.model.at_least(self.ways(v), 1)
        while self.pending:
            op = self.pending.pop()
            for u in self.structure.reads[op]:
                if not self._free(u):
                    self.model.at_least([*self.ways(u), (self.again[op], -1.0)], 0)

    def ways(self, v: int) -> list[tuple[int, float]]:
        """How ``v`` can be there after the cut, each with coefficient 1."""
        return [(self._resident(v), 1.0), (self._again(v), 1.0)]

    def _free(self, v: int) -> bool:
        producer, value = self.problem.producer[v], self.problem.values[v]
        if value.bytes == 0 or v in self.operands or self.structure.holds(v, self.cut):
            return True
        in_forward = self.cut < self.structure.forward_end
        return in_forward and self.structure.position.get(producer, self.cut + 1) > self.cut

    def _resident(self, v: int) -> int:
        if v not in self.resident:
            self.resident[v] = self.model.variable()
        return self.resident[v]

    def _again(self, v: int) -> int:
        """The variable of the op that writes ``v``."""
        op = self.problem.producer[v]
        if op not in self.again:
            first_run = (
                self.structure.demanded_at[op] > self.cut or op in self.structure.required_again
            )
            seconds = 0.0 if first_run else self.problem.ops[op].seconds
            self.again[op] = self.model.variable(
                seconds / self.structure.required_seconds * SCALE if seconds else 0.0,
                upper=1.0 if first_run or self.problem.ops[op].rerunnable else 0.0,
            )
            self.pending.append(op)
        return self.again[op]

    def limit_memory(self, room: int) -> None:
        """The bytes resident at the cut, by choice, are at most ``room``."""
        sizes = {v: self.problem.values[v].bytes for v in self.resident}
        unit = min(MIB, max(sizes.values(), default=1))  # HiGHS forgives a millionth of it
        self.model.at_most([(s, sizes[v] / unit) for v, s in self.resident.items()], room / unit)

    def resident_values(self, values: tuple[float, ...]) -> frozenset[int]:
        """The values the solution keeps at the cut, those that are free there included."""
        free = (v for v, again in enumerate(self.structure.computed_again) if again)
        chosen = (v for v, s in self.resident.items() if values[s] > 0.5)
        return frozenset((*chosen, *(v for v in free if self._free(v))))


def schedule_of_cut(structure: Structure, cut: int, kept: frozenset[int]) -> Schedule:
    """The schedule of a one-cut plan: until the cut, what is read up to there is kept as well.

    A value that is read before the cut but not resident at it is dropped at the cut, not at the end
    of forward: with one group for all of backward it would be computed again for nothing.
    """
    end = structure.forward_end
    early = {v for op in structure.order[end : cut + 1] for v in structure.reads[op]}
    early &= saved_by_default(structure.problem, structure)
    group_of = [int(at > cut) for at in range(end, len(structure.order))]
    return schedule_from_retention(structure.problem, [kept | early, kept], group_of, structure)


def promising_cuts(structure: Structure, most: int = 12) -> list[int]:
    """Positions at which keeping everything uses most bytes, at a distance from each other.

    The first is the peak. A distance of a hundredth of the step keeps them from being neighbours,
    whose bounds are the same.
    """
    used = default_bytes(structure)
    distance = max(1, len(used) // 100)
    cuts: list[int] = []
    for at in sorted(range(len(used)), key=lambda at: (-used[at], at)):
        if all(abs(at - other) >= distance for other in cuts):
            cuts.append(at)
        if len(cuts) == most:
            break
    return cuts


def default_bytes(structure: Structure) -> list[int]:
    """Bytes in use at each position of the skeleton if everything is kept."""
    schedule = keep_everything(structure.problem, structure)
    used = simulate(structure.problem, schedule).bytes
    found: dict[int, int] = {}  # of the first run of an op
    for step, bytes_there in zip(schedule.steps, used, strict=True):
        if step.kind == "compute" and step.index in structure.position:
            found.setdefault(step.index, bytes_there)
    return [found[op] for op in structure.order]
