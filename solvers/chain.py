"""``chain``: multi-level checkpointing of a chain of stages, by dynamic programming.

A. Griewank, A. Walther, "Algorithm 799: Revolve" (2000) for uniform chains; O. Beaumont, L.
Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains"
(2019, "rotor") for stages that differ. ``stages.py`` makes the chain out of the forward graph.

C(s, t, m): least seconds to recompute in order to run the windows of stages t, ..., s, last first,
when the cut that stage s starts from is there (its bytes not counted) and m bytes may be in use.
Just before window t, either

- s = t: recompute the inner values of s;
- all: recompute stage s with its inner values, keep them and its cut, then C(s + 1, t, m - bytes
  kept); window s needs nothing more;
- pass to k, s <= k < t: recompute through stage k, keeping its cut alone, then C(k + 1, t, m -
  bytes of the cut), then C(s, k, m).

D(s, m) is the same for the stages from s to the last while forward itself runs, where going through
costs nothing. The answer is D(first, budget). Each choice is open only if m covers its peak: see
:class:`Stage`. What is kept stays kept until it is read for the last time ("memory-persistent");
among those schedules of the chain the answer is the fastest, and on uniform chains the fastest of
all. m runs over multiples of the greatest common divisor of the sizes where that gives few enough
steps, else over a grid, on which sizes are rounded up.

If the budget cannot be met, the plan with the least peak is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.segments import NEVER, Candidate, Crossings, replay, save_all
from remat.solvers.stages import Stage, Stages, contract, measure

_LONG_RANGE: Final = (2.0, 0.5, 0.25, 0.125)  # of forward: values that span more are always kept
_MOST_STAGES: Final = 128
_WORK: Final = 5e7  # table entries times choices, which bounds the grid of m
_MOST_STEPS: Final = 2048
_TIGHTENINGS: Final = 6


@register("chain")
def solve_chain(request: Request) -> Proposal:
    """The best plan over a few ways to see forward as a chain."""
    problem, budget = request.problem, request.memory_budget
    best = save_all(problem)
    if budget is None or best.peak <= budget:
        return Proposal(best.schedule)
    save_all_peak, most_stages = best.peak, 1
    for stages in contractions(problem):
        most_stages = max(most_stages, len(stages.ops))
        for candidate in _plans(problem, stages, budget, save_all_peak):
            best = min(best, candidate, key=lambda plan: plan.rank(budget))
        if request.max_evaluations is None and request.seconds_left == 0.0:
            break
    if most_stages == 1:
        reason = "no value separates the first forward ops from the last"
        return Proposal(None, failures=(f"not a chain: {reason}",))
    return Proposal(best.schedule)


def contractions(problem: Problem) -> Iterator[Stages]:
    """Ways to see forward as a chain of at least two stages, at most ``_MOST_STAGES``.

    Values that many stages read (rotary tables, masks, the skips of a U-Net) hide the cuts unless
    they are kept throughout; which ones are worth it is tried out.
    """
    crossings, seen = Crossings.of(problem), set[frozenset[int]]()
    for share in _LONG_RANGE:
        span = share * len(problem.forward)
        removed = frozenset(
            v
            for v, (made, last) in enumerate(zip(crossings.made, crossings.last_read, strict=True))
            if made >= 0 and last - made > span
        )
        if removed in seen:
            continue
        seen.add(removed)
        stages = _merge(problem, contract(problem, removed))
        if stages.cuts:
            yield stages


def _merge(problem: Problem, stages: Stages) -> Stages:
    """At most ``_MOST_STAGES`` stages: those that make the fewest bytes are joined."""
    cuts, ops = list(stages.cuts), list(stages.ops)
    made = [sum(problem.values[v].bytes for i in row for v in problem.ops[i].writes) for row in ops]
    while len(ops) > _MOST_STAGES:
        k = min(range(len(cuts)), key=lambda k: made[k] + made[k + 1])
        ops[k : k + 2] = [tuple(sorted(ops[k] + ops[k + 1]))]
        made[k : k + 2] = [made[k] + made[k + 1]]
        del cuts[k]
    return Stages(tuple(cuts), tuple(ops))


def _plans(
    problem: Problem, stages: Stages, memory_budget: int, save_all_peak: int
) -> Iterator[Candidate]:
    """Plans of this chain: one that fits if the model says so and the judge agrees."""
    chain, droppable = measure(problem, stages)
    table = _Table(chain, memory_budget)
    step = table.steps if table.fits else None
    if step is None:
        table = _Table(chain, save_all_peak)
        step = table.least
    for _ in range(_TIGHTENINGS):
        if step is None or step < 0 or not np.isfinite(table.forward[0][step]):
            return
        peaks = []
        for candidate in _candidates(problem, chain, droppable, table, step):
            peaks.append(candidate.peak)
            yield candidate
        if min(peaks) <= memory_budget:
            return
        step -= max(1, -(-(min(peaks) - memory_budget) // table.unit))


def _candidates(
    problem: Problem, chain: Sequence[Stage], droppable: Iterable[int], table: _Table, step: int
) -> Iterator[Candidate]:
    """The plan of the table, recomputing stages as a whole and, second, value by value."""
    plan = table.plan(step)
    held_from = [0] * len(problem.values)
    for v in droppable:
        held_from[v] = plan.held_from.get(v, NEVER)
    yield Candidate.of(problem, replay(problem, held_from, plan.recompute_at))
    yield Candidate.of(problem, replay(problem, held_from))


@dataclass
class _Plan:
    held_from: dict[int, int] = field(default_factory=dict)
    recompute_at: dict[int, list[int]] = field(default_factory=dict)

    def hold(self, values: Iterable[int], begins: int) -> None:
        """Recompute ``values`` at position ``begins`` and hold them; -1: forward saves them."""
        values = [v for v in values if v >= 0]
        self.held_from.update((v, begins + 1) for v in values)
        if begins >= 0:
            self.recompute_at.setdefault(begins, []).extend(values)


Floats = npt.NDArray[np.float64]


class _Table:
    """C and D for every m up to a budget, in steps of ``unit`` bytes; the last step is the budget.

    ``back[s][t]`` is C as an array over steps, ``forward[s]`` is D. The choices beside them are
    -1 for "all" (or s = t), k for "pass to k", -2 for "as in backward" (D only).
    """

    def __init__(self, chain: Sequence[Stage], memory_budget: int) -> None:
        self.chain, self.budget = chain, memory_budget
        floor = min(max(stage.window_peak, stage.base) for stage in chain)
        self._choose_unit(max(0, memory_budget - floor))
        count, self.index = len(chain), np.arange(self.steps + 1)
        shape = (count, count, self.steps + 1)
        self.back: Floats = np.full(shape, np.inf)
        self.back_choice = np.full(shape, -1, np.int16)
        self.forward: Floats = np.full((count, self.steps + 1), np.inf)
        self.forward_choice = np.full((count, self.steps + 1), -1, np.int16)
        # after_cut[t, k]: C(k + 1, t, m - cut k), laid out so that all k of one t are adjacent.
        self.after_cut: Floats = np.full(shape, np.inf)
        for t in range(count):
            for s in range(t, -1, -1):
                self._fill_back(s, t)
        for s in range(count - 1, -1, -1):
            self._fill_forward(s)

    @property
    def fits(self) -> bool:
        """Whether the model has a plan within the budget."""
        return bool(np.isfinite(self.forward[0][self.steps]))

    @property
    def least(self) -> int | None:
        """The lowest step with a plan."""
        finite = np.flatnonzero(np.isfinite(self.forward[0]))
        return int(finite[0]) if finite.size else None

    def _choose_unit(self, available: int) -> None:
        kept = [stage.inner_bytes + stage.cut_bytes for stage in self.chain]
        sizes = [size for size in (*kept, *(s.cut_bytes for s in self.chain)) if size]
        most = int(_WORK * 6 / len(self.chain) ** 3)
        most = max(128, min(_MOST_STEPS, most))
        exact = math.gcd(*sizes) if sizes else max(1, available)
        if available // exact <= most:
            self.unit = exact
        else:
            grids = {available // steps + 1 for steps in range(most // 2, most, max(1, most // 64))}
            self.unit = min(grids, key=lambda unit: (sum(-size % unit for size in sizes), unit))
        self.steps = available // self.unit

    def _open(self, peak: int) -> npt.NDArray[np.bool_]:
        """At which steps ``peak`` bytes are covered."""
        return self.index >= self.steps - (self.budget - peak) // self.unit

    def _less(self, seconds: Floats, size: int) -> Floats:
        """``seconds`` as a function of m, at m - size."""
        shift = min(-(-size // self.unit), len(seconds))
        return np.concatenate([np.full(shift, np.inf), seconds[: len(seconds) - shift]])

    def _fill_back(self, s: int, t: int) -> None:
        first, last = self.chain[s], self.chain[t]
        before = last.base + last.held_over
        if s == t:
            peak = max(before + first.inner_peak, first.window_peak)
            best = np.where(self._open(peak), first.inner_seconds, np.inf)
        else:
            then = self._less(self.back[s + 1, t], first.inner_bytes + first.cut_bytes)
            peak = max(before + first.all_peak, first.window_peak)
            best = np.where(self._open(peak), first.all_seconds + then, np.inf)
            passed = self.chain[s:t]
            seconds = np.cumsum([stage.pass_seconds for stage in passed])
            peaks = [first.pass_peak, *(stage.pass_peak_input for stage in passed[1:])]
            split = self.after_cut[t, s:t] + self.back[s, s:t] + seconds[:, None]
            needed = before + np.maximum.accumulate(peaks)
            best = self._take_splits(best, split, needed, s, self.back_choice[s, t])
        self.back[s, t] = best
        if s > 0:
            self.after_cut[t, s - 1] = self._less(best, self.chain[s - 1].cut_bytes)

    def _fill_forward(self, s: int) -> None:
        count, first = len(self.chain), self.chain[s]
        then = np.zeros(self.steps + 1)
        if s + 1 < count:
            then = self._less(self.forward[s + 1], first.inner_bytes + first.cut_bytes)
        peak = max(first.forward_all_peak, first.window_peak)
        best = np.where(self._open(peak), then, np.inf)
        passed = self.chain[s:]
        peaks = [first.forward_pass_peak, *(s.forward_pass_peak_input for s in passed[1:])]
        needed = np.maximum.accumulate(peaks)
        if s + 1 < count:
            split = np.stack(
                [
                    self._less(self.forward[k + 1], self.chain[k].cut_bytes) + self.back[s, k]
                    for k in range(s, count - 1)
                ]
            )
            best = self._take_splits(best, split, needed[:-1], s, self.forward_choice[s])
        drop_all = np.where(self._open(int(needed[-1])), self.back[s, count - 1], np.inf)
        self.forward_choice[s][drop_all < best] = -2
        self.forward[s] = np.minimum(best, drop_all)

    def _take_splits(
        self,
        best: Floats,
        split: Floats,
        needed: npt.NDArray[np.int64],
        s: int,
        choice: npt.NDArray[np.int16],
    ) -> Floats:
        """The better of ``best`` and the best row of ``split``; notes the row in ``choice``."""
        lowest = self.steps - (self.budget - needed) // self.unit
        split[self.index < lowest[:, None]] = np.inf
        row = np.argmin(split, axis=0)
        taken = split[row, self.index]
        better = taken < best
        choice[better] = row[better] + s
        return np.where(better, taken, best)

    def plan(self, step: int) -> _Plan:
        """What D(first, step) keeps, and when."""
        plan, count = _Plan(), len(self.chain)
        # (s, t, step), t = count while forward itself runs.
        stack: list[tuple[int, int, int]] = [(0, count, step)]
        while stack:
            s, t, step = stack.pop()
            stage = self.chain[s]
            in_forward = t == count
            choice = int((self.forward_choice[s] if in_forward else self.back_choice[s, t])[step])
            begins = -1 if in_forward else self.chain[t].begins
            if choice == -2:
                stack.append((s, count - 1, step))
            elif choice >= 0:
                cut = self.chain[choice]
                plan.hold([cut.cut], begins)
                stack.append((s, choice, step))
                stack.append((choice + 1, t, step - -(-cut.cut_bytes // self.unit)))
            else:
                kept = stage.inner_bytes + stage.cut_bytes
                plan.hold(stage.inner, begins)
                if s < min(t, count - 1):
                    plan.hold([stage.cut], begins)
                    stack.append((s + 1, t, step - -(-kept // self.unit)))
        return plan
