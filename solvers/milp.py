"""The one-cut MILP, and the only file that knows PuLP.

Sets. A *cut* is a position c of the skeleton (``structure.py``): the moment its op runs. F are the ops
that may run again (forward, deferred); N_c are the values written by F and read by backward ops after c.

Variables. s_v = 1: value v is resident at c.  x_i = 1: op i runs (again) after c.

    minimise    sum t_i x_i
    subject to  s_v + x_p(v) >= 1            v in N_c             it is there or it is made, p(v) its op
                x_i <= s_u + x_p(u)          i in F, u read by i  so is what making it reads
                sum m_v s_v <= B - U_c       over v that is not unavoidable and not read at c

U_c are the unavoidable bytes at c, with operands and workspace of its op. What is unavoidable at c, is
read by its op, takes no bytes, or is only computed after c (c in forward) is there for free.

Validity. From any schedule of the class that fits B take s_v and x_i as they are: the rows hold, and
the schedule takes at least the required seconds plus the objective. A deferred op whose first demand
is after c may run after c for the first time, so its x costs nothing; if it is demanded by c it has
run before, so x is a second run. So the dual bound of the MILP, and the optimum of its LP relaxation,
bound the seconds of every schedule of the class from below. See docs/solver.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pulp

from remat.solvers.problem import Problem
from remat.solvers.structure import Structure
from remat.solvers.units import MIB

Outcome = Literal["optimal", "feasible", "infeasible", "unknown"]

_SCALE: Final = 1e4  # objective of a step: HiGHS's absolute tolerances are then relative ones


class MilpFailure(Exception):
    """HiGHS or PuLP stopped working; the caller records it and goes on without."""


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """What one cut says.

    Attributes:
        outcome: ``infeasible`` proves that no schedule of the class fits the budget.
        lower_bound: seconds of the whole step that no schedule within the budget beats.
        seconds: of the plan, as the cut sees it (infinite without a plan).
        kept: values resident at the cut in the plan; None without a plan.
        needed: values the cut decided on or gives for free, read after it.
    """

    outcome: Outcome
    lower_bound: float
    seconds: float = math.inf
    kept: frozenset[int] | None = None
    needed: frozenset[int] = frozenset()


def one_cut(
    problem: Problem,
    memory_budget: int,
    cut: int,
    *,
    structure: Structure | None = None,
    time_limit: float = 10.0,
    gap: float = 1e-4,
    integer: bool = True,
) -> CutAnswer:
    """Solve the MILP of this file (its LP relaxation with ``integer=False``) at position ``cut``.

    Args:
        time_limit: seconds; infinite lets HiGHS finish.
        gap: relative gap, of the objective, at which HiGHS may stop.

    Raises:
        MilpFailure: the solver broke; nothing is known.
    """
    structure = structure or Structure(problem)
    room = memory_budget - int(structure.unavoidable_bytes[cut])
    if room < 0:
        return CutAnswer("infeasible", math.inf)
    model = _OneCut(problem, structure, cut, integer)
    model.limit_memory(room)
    return model.answer(time_limit, gap)


@dataclass
class _OneCut:
    problem: Problem
    structure: Structure
    cut: int
    integer: bool
    resident: dict[int, pulp.LpVariable] = field(default_factory=dict)
    again: dict[int, pulp.LpVariable] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = pulp.LpProblem("one_cut", pulp.LpMinimize)
        self.operands = frozenset(self.structure.reads[self.structure.order[self.cut]])
        self.needed = self._needed()
        self._state_demands()
        self.model.setObjective(
            pulp.lpSum(self._cost(i) * x for i, x in self.again.items() if self._cost(i))
        )

    def _needed(self) -> frozenset[int]:
        first = max(self.cut + 1, self.structure.forward_end)
        made_again = self.structure.computed_again
        read = (v for op in self.structure.order[first:] for v in self.structure.reads[op])
        outputs = (v for v, value in enumerate(self.problem.values) if value.output)
        return frozenset(v for v in (*read, *outputs) if made_again[v])

    def _free(self, v: int) -> bool:
        op = self.problem.producer[v]
        later = (
            self.cut < self.structure.forward_end
            and self.structure.position.get(op, self.cut + 1) > self.cut
        )
        empty = self.problem.values[v].bytes == 0
        return later or empty or v in self.operands or self.structure.holds(v, self.cut)

    def _cost(self, op: int) -> float:
        if self.structure.demanded_at[op] > self.cut:
            return 0.0
        return self.problem.ops[op].seconds / self.structure.required_seconds * _SCALE

    def _variable(self, name: str) -> pulp.LpVariable:
        return pulp.LpVariable(name, 0, 1, pulp.LpInteger if self.integer else pulp.LpContinuous)

    def _state_demands(self) -> None:
        """A needed value is resident or its op runs again; so, in turn, for what that op reads."""
        for v in sorted(self.needed):
            if not self._free(v):
                self._constrain(self._resident(v) + self._again(self.problem.producer[v]) >= 1)
        while self.pending:
            op = self.pending.pop()
            for u in self.structure.reads[op]:
                if not self._free(u):
                    made = self._again(self.problem.producer[u])
                    self._constrain(self.again[op] <= self._resident(u) + made)

    def _resident(self, v: int) -> pulp.LpVariable:
        if v not in self.resident:
            self.resident[v] = self._variable(f"s{v}")
        return self.resident[v]

    def _again(self, op: int) -> pulp.LpVariable:
        if op not in self.again:
            self.again[op] = self._variable(f"x{op}")
            self.pending.append(op)
            if not self.problem.ops[op].rerunnable and self.structure.demanded_at[op] <= self.cut:
                self.again[op].upBound = 0
        return self.again[op]

    def _constrain(self, row: Any) -> None:
        self.model.addConstraint(row)

    def limit_memory(self, room: int) -> None:
        """The bytes resident at the cut, by choice, are at most ``room``."""
        values = self.problem.values
        self._constrain(
            pulp.lpSum(values[v].bytes / MIB * s for v, s in self.resident.items()) <= room / MIB
        )

    def answer(self, time_limit: float, gap: float) -> CutAnswer:
        required = self.structure.required_seconds
        found = solve_model(self.model, time_limit, gap)
        if found.outcome == "infeasible":
            return CutAnswer("infeasible", math.inf)
        bound = required * (1 + max(0.0, found.bound) / _SCALE)
        if found.outcome == "unknown" or not self.integer:
            return CutAnswer(found.outcome, bound)
        free = (
            v
            for v in range(len(self.problem.values))
            if self.structure.computed_again[v] and self._free(v)
        )
        chosen = (v for v, s in self.resident.items() if s.value() > 0.5)
        return CutAnswer(
            found.outcome,
            bound,
            required * (1 + found.objective / _SCALE),
            frozenset((*chosen, *free)),
            self.needed,
        )


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """How HiGHS left a model: its own status, not PuLP's, which calls a time-out optimal."""

    outcome: Outcome
    objective: float
    bound: float


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS interface with a start, and without its reading of the status."""

    def __init__(self, start: Iterable[tuple[pulp.LpVariable, float]] = (), **options: Any) -> None:
        super().__init__(msg=False, threads=1, **options)
        self.start = tuple(start)

    def callSolver(self, lp: pulp.LpProblem) -> None:
        if self.start:
            columns = [variable.index for variable, _ in self.start]
            lp.solverModel.setSolution(len(columns), columns, [value for _, value in self.start])
        lp.solverModel.run()

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        values = lp.solverModel.getSolution().col_value
        if len(values) == 0:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        for variable in lp.variables():
            variable.varValue = values[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def solve_model(
    model: pulp.LpProblem,
    time_limit: float,
    gap: float,
    start: Iterable[tuple[pulp.LpVariable, float]] = (),
) -> ModelAnswer:
    """Run HiGHS on ``model`` (minimise) and read status, objective and dual bound from it.

    Raises:
        MilpFailure: it could not be run.
    """
    limit = None if math.isinf(time_limit) else max(0.05, time_limit)
    try:
        model.solve(_Highs(start, timeLimit=limit, gapRel=gap))
        highs = model.solverModel
        status = highs.modelStatusToString(highs.getModelStatus())
        info = highs.getInfo()
    except (pulp.PulpError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise MilpFailure(f"HiGHS through PuLP {pulp.__version__}: {error}") from error
    return _read(status, info, model.isMIP())


def _read(status: str, info: Any, integer: bool) -> ModelAnswer:
    if status == "Infeasible":
        return ModelAnswer("infeasible", math.inf, math.inf)
    if status == "Empty":
        return ModelAnswer("optimal", 0.0, 0.0)
    found = info.primal_solution_status == 2  # highspy.SolutionStatus.kSolutionStatusFeasible
    objective = info.objective_function_value if found else math.inf
    if status == "Optimal":
        return ModelAnswer("optimal", objective, info.mip_dual_bound if integer else objective)
    bound = info.mip_dual_bound if integer and math.isfinite(info.mip_dual_bound) else 0.0
    return ModelAnswer("feasible" if found and integer else "unknown", objective, bound)
