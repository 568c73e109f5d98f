"""What the user decided himself, ``keep`` and ``recompute``, and what that costs him."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from remat.options import Options
from remat.passes.choices import cannot_be_recomputed, constrain, is_known
from remat.solvers.choose import least_peak
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.problem import Problem
from remat.solvers.units import format_bytes


@dataclass(frozen=True)
class Decided:
    """The patterns of modules that hold for a graph: the options', or those of a stored plan."""

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    @staticmethod
    def of(options: Options) -> Decided:
        """The decisions ``options`` make."""
        if options.plan is not None:
            return Decided(options.plan.keep, options.plan.recompute)
        return Decided(options.keep, options.recompute)

    def known_in(self, problem: Problem) -> Decided:
        """Those that mean a module of ``problem``: of several graphs, one may lack some."""
        return Decided(
            tuple(pattern for pattern in self.keep if is_known(problem.ops, pattern)),
            tuple(pattern for pattern in self.recompute if is_known(problem.ops, pattern)),
        )

    def __bool__(self) -> bool:
        return bool(self.keep or self.recompute)

    def constrain(self, problem: Problem) -> Problem:
        """``problem`` with these decisions in it; see :mod:`remat.passes.choices`.

        Raises:
            InvalidOption: a pattern means no module, or a module is to be kept and recomputed.
        """
        return constrain(problem, self.keep, self.recompute) if self else problem

    def notes(self, problem: Problem) -> tuple[str, ...]:
        """What of ``recompute`` cannot be honoured, because it may not be run again."""
        if not self.recompute:
            return ()
        names = cannot_be_recomputed(problem, self.recompute)
        return tuple(
            f"{name} is kept, though recompute means it: it may not run again" for name in names
        )

    def explain(self, error: BudgetTooSmall, problem: Problem, options: Options) -> BudgetTooSmall:
        """``error``, and the least peak without the patterns, and without each of them.

        Args:
            problem: without the decisions.
            options: the time that each search for a least peak may take.
        """
        if not self:
            return error
        lines = [str(error), *self._costs(error.least_peak, problem, options)]
        return BudgetTooSmall(
            "\n".join(lines),
            memory_budget=error.memory_budget,
            least_peak=error.least_peak,
            peak_lower_bound=error.peak_lower_bound,
        )

    def _costs(self, least: int, problem: Problem, options: Options) -> Iterator[str]:
        limit = options.time_limit / (1 + len(self.keep) + len(self.recompute))
        without = least_peak(problem, time_limit=limit).peak
        yield (
            f"Without keep and recompute the least peak is {format_bytes(without)} "
            f"({without} bytes)" + ("." if without < least else ": they are not what costs it.")
        )
        if without >= least or len(self.keep) + len(self.recompute) == 1:
            return
        for option, pattern, rest in self._without_one():
            peak = least_peak(rest.constrain(problem), time_limit=limit).peak
            yield f"  without {option}={pattern!r}: {format_bytes(peak)} ({peak} bytes)"

    def _without_one(self) -> Iterator[tuple[str, str, Decided]]:
        for pattern in self.keep:
            rest = tuple(other for other in self.keep if other != pattern)
            yield "keep", pattern, Decided(rest, self.recompute)
        for pattern in self.recompute:
            rest = tuple(other for other in self.recompute if other != pattern)
            yield "recompute", pattern, Decided(self.keep, rest)
