"""The sentence that explains one decision."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from remat.passes.choices import is_known
from remat.plan_rows import runs_again
from remat.report.changes import NOT_KEEPABLE, RUNS_ONCE, Change, change
from remat.report.names import without_call
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Problem
from remat.solvers.schedule import Decision, decisions
from remat.solvers.units import MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from remat.report.judged import Judged

_OF_STEP: Final = (
    "it was decided for the whole step, and what else is alive then is known there; ask the plan "
    "of the step (step_plan.why, with a name of step_plan.decisions)"
)
_VERB: Final = {
    Decision.KEEP: "is kept",
    Decision.RECOMPUTE: "is recomputed",
    Decision.OFFLOAD: "is offloaded",
}


def why(plan: Judged, value: str) -> str:
    """Why ``value`` is kept, recomputed or offloaded, and what the other choice would do.

    Raises:
        InvalidOption: the plan has no such value; the nearest names are given.
    """
    problem = plan.problem
    index = _find(problem, value)
    decision = decisions(problem, plan.solution.schedule).get(index)
    if decision is None:
        return f"{_named(problem, index)} {_no_decision(problem, index)}."
    if plan.in_step:
        return f"{_named(problem, index)} {_VERB[decision]}: {_OF_STEP}."
    case = _Case(plan, index, decision)
    return f"{_named(problem, index)} {_VERB[decision]}: {case.reason()}."


def _find(problem: Problem, value: str) -> int:
    if not isinstance(value, str):
        raise InvalidOption(f"value is {value!r}, not the name of a value, as in plan.decisions")
    names = [held.name for held in problem.values]
    if value in names:
        return names.index(value)
    of_calls = [name for name in names if name.partition(": ")[2] == value]
    if len(of_calls) == 1:
        return names.index(of_calls[0])
    near = of_calls or difflib.get_close_matches(value, names, n=3)
    hint = f"; near it are {', '.join(near)}" if near else "; plan.decisions has the names"
    raise InvalidOption(f"the plan has no value {value!r}{hint}")


def _named(problem: Problem, index: int) -> str:
    """``gelu_3 (8.00 MiB, transformer.h.3.mlp.act, modeling_gpt2.py:312)``."""
    held, producer = problem.values[index], problem.producer[index]
    parts = [format_bytes(held.bytes)]
    if producer >= 0:
        op = problem.ops[producer]
        parts += [part for part in (op.layer, op.source) if part]
    return f"{held.name} ({', '.join(parts)})"


def _no_decision(problem: Problem, index: int) -> str:
    held, producer = problem.values[index], problem.producer[index]
    if held.owned:
        return "is resident: the caller owns it, and no plan changes that"
    if held.tangent:
        return "arrives with backward, so there is nothing to decide"
    if held.output == "forward":
        return "is returned by forward, so it is there to the end"
    if producer >= 0 and problem.ops[producer].phase == "backward":
        return "is made in backward: it is held until its last reader, under any plan"
    if producer >= 0 and problem.ops[producer].phase == "deferred":
        return "is first made in backward, where it is first read: nothing waits"
    return "needs no decision: backward does not read it, so it is freed in forward"


@dataclass(frozen=True)
class _Case:
    plan: Judged
    index: int
    decision: Decision

    def reason(self) -> str:
        plan = self.plan
        other = change(plan.problem, plan.solution.schedule, self.index, self.decision, plan.link)
        if self.decision is Decision.KEEP:
            return self._kept(other)
        if self.decision is Decision.RECOMPUTE:
            return self._recomputed(other)
        where = f" ({plan.offload})" if plan.offload else ""
        return f"its bytes wait for backward elsewhere{where}. {self._if_kept(other)}"

    def _kept(self, other: Change) -> str:
        plan, budget = self.plan, self.plan.memory_budget
        if other.refused == RUNS_ONCE and self._kept_by_pattern():
            return f"keep={', '.join(map(repr, plan.keep))} says that its op runs once"
        if other.timeline is None:
            return other.refused
        cost, peak = self._differences(other)
        again = f"to recompute it would take {_more(cost)}"
        if budget is None or plan.solution.solver == "baseline":
            met = "no budget was asked for" if budget is None else "the baseline meets the budget"
            return f"{met}; {again} and {_change_of_peak(peak)}"
        if peak >= 0:
            gains = "would not lower the peak" if peak == 0 else _change_of_peak(peak)
            return f"{again} and {gains}{self._where(peak)}"
        return f"{again} and {_change_of_peak(peak)}{self._price(cost, -peak)}"

    def _kept_by_pattern(self) -> bool:
        problem = self.plan.problem
        op = problem.ops[problem.producer[self.index]]
        if self.plan.several_calls:
            op = replace(op, layer=without_call(op.layer))
        return any(is_known((op,), pattern) for pattern in self.plan.keep)

    def _price(self, cost: float, saved: int) -> str:
        """Beside what the plan pays for the bytes it does save."""
        plan = self.plan
        paid = plan.solution.seconds - plan.baseline_timeline.seconds
        spared = plan.baseline_peak - plan.solution.peak
        if cost <= 0 or paid <= 0 or spared <= 0:
            return ", which the budget does not ask for"
        own, usual = cost / saved, paid / spared
        mine, theirs = (format_seconds(price * MIB) for price in (own, usual))
        if own > usual:
            return f": {mine} a MiB, where the plan pays {theirs} on average"
        return f": {mine} a MiB, no more than the plan pays on average, but the budget is met"

    def _where(self, peak: int) -> str:
        alive = self.index in self.plan.solution.timeline.alive_at_peak
        if peak > 0:
            return ", because of what it is made from"
        return "" if alive else ", where it is not alive"

    def _recomputed(self, other: Change) -> str:
        plan, problem = self.plan, self.plan.problem
        producer = problem.producer[self.index]
        times = runs_again(plan.solution.schedule)[producer]
        op = problem.ops[producer]
        often = "again" if times == 1 else f"{times} times more"
        head = (
            f"{op.target or op.name} runs {often}, {_share(plan, times * op.seconds)}, and its "
            f"{format_bytes(problem.values[self.index].bytes)} need not wait for backward"
        )
        if other.refused == NOT_KEEPABLE:
            return f"it was decided that it may not be kept; {head}"
        return f"{head}. {self._if_kept(other)}"

    def _if_kept(self, other: Change) -> str:
        if other.timeline is None:
            return f"It cannot simply be kept: {other.refused}"
        plan = self.plan
        cost, _ = self._differences(other)
        new, budget = other.timeline.peak, plan.memory_budget
        saves = f"save {format_seconds(-cost)}" if cost < 0 else "save no time"
        text = f"Kept, it would {saves}, and the peak would be {format_bytes(new)}"
        if budget is None:
            return text
        if new > budget:
            return f"{text}, {format_bytes(new - budget)} over the budget"
        rest = f"{text}, still within the budget"
        if cost >= 0:
            return rest
        return f"{rest}: the solver left this, within its gap of {100 * plan.gap:.2f} %"

    def _differences(self, other: Change) -> tuple[float, int]:
        assert other.timeline is not None
        now = self.plan.solution.timeline
        return other.timeline.seconds - now.seconds, other.timeline.peak - now.peak


def _more(seconds: float) -> str:
    if seconds <= 0:
        return "no time"
    return f"{format_seconds(seconds)} more"


def _share(plan: Judged, seconds: float) -> str:
    step = plan.baseline_timeline.seconds
    share = f" ({100 * seconds / step:.2f} % of the step)" if step > 0 else ""
    return f"which takes {format_seconds(seconds)}{share}"


def _change_of_peak(change: int) -> str:
    if change == 0:
        return "leave the peak as it is"
    way = "lower" if change < 0 else "raise"
    return f"{way} the peak by {format_bytes(abs(change))}"
