"""``greedy``: for the impatient. Evict what is cheapest to recompute, a byte, until the plan fits.

The rule is that of M. Kirisame et al., "Dynamic Tensor Rematerialization" (2021), applied ahead of
time: at the peak, evict the value with the least h = (seconds to recompute it) / (bytes freed). The
cost is recursive: a recomputation that needs what is gone by then runs that, too. DTR's third
factor, staleness, only predicts when a value is needed again; here that is known.

An evicted value is dropped up to the peak, and held from where it is first recomputed after it. If
that makes another peak it is evicted again, and then left alone for part of the way to its next
read; so the search ends. Each round evicts enough to bring its peak down to the budget, or to the
floor no plan goes under; other peaks have their own rounds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from remat.solvers.bounds import floor
from remat.solvers.demand import always_kept
from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.segments import (
    NEVER,
    Candidate,
    Demands,
    lifetimes,
    replay,
    save_all,
)

_ROUNDS: Final = 60
# Evicted again, a value is not held for the next 1/4 of its way: with 1/1 a U-Net at a third of its
# peak takes 5 % longer, with nothing an LSTM at half its peak is never done moving its peak along.
_HESITATION: Final = 4
# Rounds without a lower excess before giving up: some evictions only move the peak about.
_PATIENCE: Final = 20


@register("greedy")
def solve_greedy(request: Request) -> Proposal:
    """The first plan that fits, or the one with the least peak on the way."""
    problem, budget = request.problem, request.memory_budget
    best = save_all(problem)
    if budget is None or best.peak <= budget:
        return Proposal(best.schedule)
    demands, held_from = Demands.of(problem), [0] * len(problem.values)
    for index in problem.forward:
        for v in problem.ops[index].writes:
            # What backward does not need is not held for a recomputation either.
            held_from[v] = 0 if demands.last[v] >= 0 else NEVER
    target = max(budget, floor(problem)[0])
    rounds = _ROUNDS if request.max_evaluations is None else request.max_evaluations
    stale = 0
    for _ in range(rounds):
        candidate = Candidate.of(problem, replay(problem, held_from))
        better = candidate.rank(budget) < best.rank(budget)
        best, stale = (candidate, 0) if better else (best, stale + 1)
        late = request.max_evaluations is None and request.seconds_left == 0.0
        if candidate.peak <= target or late or stale > _PATIENCE:
            break
        if not _Round(problem, held_from, candidate).evict(candidate.peak - target):
            break
    return Proposal(best.schedule)


class _Round:
    """One look at a plan: what is alive at its peak, and what recomputing it would take."""

    def __init__(self, problem: Problem, held_from: list[int], plan: Candidate) -> None:
        self.problem, self.held_from, self.plan = problem, held_from, plan
        self.kept = always_kept(problem)
        self.peak = max(range(len(plan.computes)), key=plan.bytes.__getitem__)
        backward = [problem.ops[index].phase == "backward" for index in plan.computes]
        self.ends = [place for place, ends in enumerate(backward) if ends]
        self.now = self._position(self.peak)
        self.last = [-1] * len(self.kept)
        over_the_peak = set()
        for v, first, last in lifetimes(problem, plan.computes):
            self.last[v] = max(self.last[v], last)
            if first < self.peak < last and self._is_evictable(v):
                over_the_peak.add(v)
        self.candidates = list(self._needed_later(over_the_peak))

    def _position(self, place: int) -> int:
        """How many backward ops are done at a place of the plan; -1 in forward."""
        return -1 if place < len(self.problem.forward) else bisect_left(self.ends, place)

    def _is_evictable(self, v: int) -> bool:
        maker = self.problem.producer[v]
        if maker < 0 or self.problem.ops[maker].phase == "backward" or self.kept[v]:
            return False
        return self.problem.values[v].bytes > 0

    def _needed_later(self, alive: set[int]) -> Iterator[tuple[int, int]]:
        """(value, position that reads it next), if that is a later position of backward."""
        for place in range(self.peak + 1, len(self.plan.computes)):
            for v in alive.intersection(self.problem.ops[self.plan.computes[place]].reads):
                alive.discard(v)
                if self._position(place) > self.now:
                    yield v, self._position(place)

    def evict(self, excess: int) -> bool:
        """Evict until ``excess`` bytes are gone at the peak; False if nothing could be."""
        queue = [(self._score(v, position), v, position) for v, position in self.candidates]
        heapq.heapify(queue)
        evicted = False
        while queue and excess > 0:
            _, v, position = heapq.heappop(queue)
            score = self._score(v, position)  # what was evicted since may have made it dearer
            if queue and score > queue[0][0]:
                heapq.heappush(queue, (score, v, position))
            elif score < float("inf"):
                again = (position - self.now - 1) // _HESITATION if self.held_from[v] else 0
                self.held_from[v] = self.now + 2 + again
                excess -= self.problem.values[v].bytes
                evicted = True
        return evicted

    def _score(self, v: int, position: int) -> float:
        """Seconds to recompute ``v`` at ``position``, a byte freed at the peak."""
        ops, seconds, longer = self.problem.ops, 0.0, 0
        ran, stack = set[int](), [v]
        while stack:
            index = self.problem.producer[stack.pop()]
            if index in ran:
                continue
            ran.add(index)
            seconds += ops[index].seconds
            for u in ops[index].reads:
                if self.problem.values[u].owned:
                    continue
                if self.kept[u] or self.held_from[u] <= position:
                    # An input that was gone by the peak would have to stay for it.
                    longer += self.problem.values[u].bytes if self.last[u] < self.peak else 0
                else:
                    stack.append(u)
        freed = self.problem.values[v].bytes - longer
        return seconds / freed if freed > 0 else float("inf")
