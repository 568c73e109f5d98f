"""Linear models with integer variables, and the only file that knows PuLP.

PuLP 3 and 4 report a HiGHS time-out differently, and 3 calls it optimal; so the status, the dual
bound and the values are read from HiGHS itself, in the one method that both versions call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pulp

Outcome = Literal["optimal", "feasible", "infeasible", "unknown"]
Terms = Sequence[tuple[int, float]]

NODES: Final = 200  # of a model where evaluations are counted instead of time
_FEASIBLE: Final = 2  # highspy.SolutionStatus.kSolutionStatusFeasible


class MilpFailure(Exception):
    """HiGHS or PuLP stopped working; the caller records it and goes on without."""


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """How HiGHS left a model.

    Attributes:
        outcome: ``optimal`` within the gap, ``feasible`` (stopped early), ``infeasible`` (proven),
            ``unknown`` (stopped early, without a solution).
        objective: of the solution; infinite without one.
        bound: no solution has a lower objective; -inf if nothing is known.
        values: of the variables, by index; empty without a solution.
    """

    outcome: Outcome
    objective: float
    bound: float
    values: tuple[float, ...] = ()


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS interface that takes a start and keeps what HiGHS itself reports.

    PuLP leaves out variables that no row and no cost names, so the columns of HiGHS are matched
    with ``count`` variables by name; those left out are 0.
    """

    def __init__(self, start: Mapping[int, float] | None, count: int, **options: Any) -> None:
        super().__init__(msg=False, threads=1, **options)
        self.start, self.count = start or {}, count
        self.report: tuple[str, Any, tuple[float, ...]] | None = None

    def callSolver(self, lp: pulp.LpProblem) -> None:
        highs = lp.solverModel
        named = [(at, variable.name) for at, variable in enumerate(lp.variables())]
        index_of = {at: int(name[1:]) for at, name in named if name.startswith("x")}
        started = [at for at, index in index_of.items() if index in self.start]
        if started:
            highs.setSolution(len(started), started, [self.start[index_of[at]] for at in started])
        highs.run()
        status = highs.modelStatusToString(highs.getModelStatus())
        values = [0.0] * self.count
        for at, value in enumerate(highs.getSolution().col_value):
            if at in index_of:
                values[index_of[at]] = value
        self.report = status, highs.getInfo(), tuple(values)


@dataclass
class Model:
    """Minimise a linear objective over variables in [0, upper], binary unless ``relaxed``."""

    relaxed: bool = False
    _lp: Any = field(default_factory=lambda: pulp.LpProblem("remat", pulp.LpMinimize))
    _variables: list[Any] = field(default_factory=list)
    _costs: list[tuple[int, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, *, upper: float = 1.0, integer: bool = True) -> int:
        """A new variable; answers its index. PuLP sorts by name: the name sorts like the index."""
        index = len(self._variables)
        kind = pulp.LpInteger if integer and not self.relaxed else pulp.LpContinuous
        self._variables.append(self._lp.add_variable(f"x{index:08d}", 0, upper, kind))
        if cost:
            self._costs.append((index, cost))
        return index

    def at_least(self, terms: Terms, bound: float) -> None:
        """The row: sum of coefficient times variable >= ``bound``."""
        self._lp += self._sum(terms) >= bound

    def at_most(self, terms: Terms, bound: float) -> None:
        """The row: sum of coefficient times variable <= ``bound``."""
        self._lp += self._sum(terms) <= bound

    def _sum(self, terms: Terms) -> Any:
        return pulp.lpSum([weight * self._variables[index] for index, weight in terms])

    def solve(
        self,
        *,
        time_limit: float,
        gap: float = 0.0,
        nodes: int | None = None,
        start: Mapping[int, float] | None = None,
    ) -> ModelAnswer:
        """Run HiGHS for at most ``time_limit`` seconds or ``nodes`` nodes, to a relative ``gap``.

        Raises:
            MilpFailure: it could not be run, or gave up without a reason.
        """
        self._lp.setObjective(self._sum(self._costs))
        options: dict[str, Any] = {"gapRel": gap}
        if math.isfinite(time_limit):
            options["timeLimit"] = max(0.05, time_limit)
        if nodes is not None:
            options["mip_max_nodes"] = nodes
        solver = _Highs(start, len(self._variables), **options)
        try:
            self._lp.solve(solver)
        except (pulp.PulpError, RuntimeError, LookupError, AttributeError, TypeError) as error:
            if solver.report is None:  # else HiGHS is done, and PuLP failed to read the answer
                raise MilpFailure(f"HiGHS through PuLP {pulp.__version__}: {error}") from error
        if solver.report is None:
            raise MilpFailure(f"PuLP {pulp.__version__} did not run HiGHS")
        return _read(*solver.report, relaxed=self.relaxed)


def _read(status: str, info: Any, values: tuple[float, ...], *, relaxed: bool) -> ModelAnswer:
    if status == "Infeasible":
        return ModelAnswer("infeasible", math.inf, math.inf)
    if status == "Empty":
        return ModelAnswer("optimal", 0.0, 0.0, values)
    found = info.primal_solution_status == _FEASIBLE
    objective = info.objective_function_value if found else math.inf
    if status == "Optimal":
        bound = objective if relaxed else info.mip_dual_bound
        return ModelAnswer("optimal", objective, bound, values)
    bound = -math.inf if relaxed or math.isnan(info.mip_dual_bound) else info.mip_dual_bound
    if found and not relaxed:
        return ModelAnswer("feasible", objective, bound, values)
    return ModelAnswer("unknown", math.inf, bound)
