"""The search: from known plans to a faster one within a budget, or to one with a smaller peak.

Two workers anneal (``anneal.py``) side by side, without the interpreter lock, each from its own
start and with its own random numbers. They meet after every chunk of evaluations, so that with a
number of evaluations instead of a clock the outcome depends on the seed alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from remat.solvers.anneal import BEST, NOW, Memory, anneal, fill, new_memory, repair, save, sweep
from remat.solvers.evaluate import (
    LENGTH,
    PEAK,
    Arrays,
    Ints,
    Sequence,
    arrays_of,
    load,
    new_sequence,
)
from remat.solvers.moves import EVALUATIONS, Scratch, new_scratch
from remat.solvers.schedule import Schedule
from remat.solvers.seeds import Segments, replay_rule
from remat.solvers.structure import Structure

WORKERS: Final = 2
_HEAT: Final = 0.002  # first temperature, as a share of the seconds of the plan
_MEETING: Final = 0.15  # seconds between two meetings of the workers
_REPAIR_STEPS: Final = 50  # evictions between two looks at the clock
_WIDTH: Final = 120  # evictions priced at each step of a repair
_DESCENT: Final = (1.0, 0.25, 0.08, 0.02, 0.005)  # shares of the way down tried in one step
_SLOWEST: Final = 6.0  # a plan that takes so many times the required seconds is given up
_NOISE: Final = 1.0  # prices of evictions are up to twice what they are, at random
_WORST_START: Final = 1.1  # times the best plan's seconds that a new start may take
_MOST_A_CHUNK: Final = 10**6  # evaluations; where there is nothing to try, chunks take no time
_PATIENCE: Final = 0.02  # share of the effort, and rounds, without a faster plan: then it is stuck
_ROUNDS: Final = 1000
_LAST: Final = 0.7  # share of the effort after which both workers polish the best plan


@dataclass(frozen=True, eq=False)
class Found:
    """A sequence of ops, its seconds and its peak in bytes."""

    ops: Ints
    seconds: float
    peak: int

    @property
    def rank(self) -> tuple[float, int]:
        return self.seconds, self.peak


@dataclass
class Effort:
    """How much may be spent: until ``deadline`` (``time.monotonic()``), or so many evaluations."""

    deadline: float
    max_evaluations: int | None = None
    spent: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def used(self) -> float:
        """The share that is spent, 0 to 1."""
        if self.max_evaluations is not None:
            return min(1.0, self.spent / self.max_evaluations) if self.max_evaluations > 0 else 1.0
        if math.isinf(self.deadline):
            return 0.0
        whole = self.deadline - self.began
        return min(1.0, (time.monotonic() - self.began) / whole) if whole > 0 else 1.0

    @property
    def over(self) -> bool:
        return self.used >= 1.0

    def part(self, share: float) -> Effort:
        """A share of what is left, as an effort of its own; report back with ``charge``."""
        if self.max_evaluations is not None:
            left = max(0, self.max_evaluations - self.spent)
            return Effort(self.deadline, math.ceil(left * share))
        now = time.monotonic()
        return Effort(now + max(0.0, self.deadline - now) * share)

    def charge(self, other: Effort) -> None:
        """Count what ``other`` has spent."""
        self.spent += other.spent


@dataclass
class Worker:
    """One search with its buffers."""

    arrays: Arrays
    sequence: Sequence
    scratch: Scratch
    memory: Memory
    improved: float = math.inf  # seconds of the last faster plan
    since: float = 0.0  # when that was, as a share of the effort
    rounds: int = 0  # of annealing since then

    @staticmethod
    def new(arrays: Arrays, seed: int) -> Worker:
        sequence = new_sequence(arrays)
        return Worker(
            arrays, sequence, new_scratch(arrays, sequence), new_memory(arrays, sequence, seed)
        )

    def found(self) -> Found:
        """What the sequence is now."""
        s = self.sequence
        return Found(
            s.ops[: s.facts[LENGTH]].astype(np.int32), float(s.seconds[0]), int(s.facts[PEAK])
        )

    def load(self, ops: Ints) -> bool:
        return bool(load(self.arrays, self.sequence, ops.astype(np.int64), len(ops)))

    def repair(
        self,
        ops: Ints,
        budget: int,
        effort: Effort,
        most: float = math.inf,
        noise: float = 0.0,
    ) -> Found | None:
        """Evict until ``budget`` is kept, then, if effort is left, take out what is not needed.

        None if the budget is not reached within the effort.

        ``noise`` makes it greedy at random: another plan every time.
        """
        if not self.load(ops):
            return None
        done = False
        while not done and not effort.over:
            before, length = int(self.scratch.facts[EVALUATIONS]), int(self.sequence.facts[LENGTH])
            done = bool(
                repair(self.arrays, self.sequence, self.scratch, self.memory, budget,
                       _REPAIR_STEPS, _WIDTH, most, noise)
            )  # fmt: skip
            priced = int(self.scratch.facts[EVALUATIONS]) - before
            effort.spent += priced
            if not done and (priced == 0 or self.sequence.facts[LENGTH] == length):
                return None
            if not done and self.sequence.seconds[0] > most:
                return None
        if not done:
            return None
        before = int(self.scratch.facts[EVALUATIONS])
        if not effort.over:  # either may take seconds on ten thousand ops
            sweep(self.arrays, self.sequence, self.scratch, budget)
        if not effort.over:
            fill(self.arrays, self.sequence, self.scratch, self.memory, budget, _WIDTH)
        effort.spent += int(self.scratch.facts[EVALUATIONS]) - before
        return self.found()

    def stand_at(self, plan: Found, used: float = 0.0) -> None:
        """Search on from ``plan``, forgetting what was found; ``used`` effort so far."""
        self.load(plan.ops)
        self.improved, self.since, self.rounds = plan.seconds, used, 0
        save(self.sequence, self.memory, NOW)
        save(self.sequence, self.memory, BEST)
        self.memory.counts[0] = 0

    def anneal(self, budget: int, evaluations: int, temperature: float) -> int:
        """One chunk; the evaluations it took."""
        before = int(self.scratch.facts[EVALUATIONS])
        self.rounds += anneal(
            self.arrays, self.sequence, self.scratch, self.memory, budget, evaluations, temperature
        )
        return int(self.scratch.facts[EVALUATIONS]) - before

    @property
    def seconds(self) -> float:
        return float(self.memory.seconds[BEST])

    def is_stuck(self, used: float) -> bool:
        """Whether it has not found a faster plan for a while, ``used`` being the effort so far."""
        if self.seconds < self.improved:
            self.improved, self.since, self.rounds = self.seconds, used, 0
        return used - self.since > _PATIENCE and self.rounds > _ROUNDS

    def best(self) -> Found:
        length = int(self.memory.length[BEST])
        self.load(self.memory.ops[BEST, :length])
        return self.found()


class Searcher:
    """Searches on one problem; buffers and seeds are made once and shared by all budgets."""

    def __init__(self, structure: Structure, seed: int = 0) -> None:
        self.structure, self.problem = structure, structure.problem
        self.arrays = arrays_of(self.problem)
        self.restarts = 0
        self.workers = [Worker.new(self.arrays, WORKERS * seed + k) for k in range(WORKERS)]

    def found(self, schedule: Schedule) -> Found | None:
        """A schedule as the search sees it, without offloads; None if it has no room for it."""
        worker = self.workers[0]
        return worker.found() if worker.load(np.array(schedule.computes, dtype=np.int64)) else None

    def schedule(self, plan: Found) -> Schedule:
        """The schedule of a plan."""
        return Schedule.from_computes(self.problem, [int(op) for op in plan.ops])

    @cached_property
    def seeds(self) -> list[Found]:
        """Nested checkpointing plans, the smallest peak first; only those that none dominates."""
        worker, structure = self.workers[0], self.structure
        outputs = [v for v, value in enumerate(self.problem.values) if value.output]
        made = [v for v in outputs if self.problem.producer[v] >= 0]
        ops = np.zeros(len(worker.sequence.ops), dtype=np.int64)
        seeds: list[Found] = []
        for rule in Segments(structure).rules:
            length = replay_rule(
                self.arrays,
                np.array(structure.order, dtype=np.int64),
                np.array(made, dtype=np.int64),
                rule,
                np.zeros(len(self.problem.values), dtype=np.int64),
                worker.scratch.stack,
                ops,
            )
            if length >= 0 and load(self.arrays, worker.sequence, ops, length):
                seeds.append(worker.found())
        return undominated(seeds)

    def lower(
        self, starts: Iterable[Found], target: int, effort: Effort, *, tries: int = 4
    ) -> Found | None:
        """The plan with the smallest peak that repair reaches from ``starts``, ``target`` at least.

        Tries the whole way first, then a quarter of it at a time, then smaller steps.
        """
        pool = sorted(starts, key=lambda plan: (plan.peak, plan.seconds))[:tries]
        if not pool:
            return None
        best, worker = pool[0], self.workers[0]
        most = _SLOWEST * self.structure.required_seconds
        for share in _DESCENT:
            stepping = True
            while stepping and best.peak > target and not effort.over:
                budget = max(target, best.peak - max(1, math.ceil((best.peak - target) * share)))
                stepping = False
                for start in (best, *pool):
                    part = effort.part(0.2)
                    reached = worker.repair(start.ops, budget, part, most)
                    effort.charge(part)
                    if reached is not None:
                        best, stepping = reached, share < 1.0
                        break
        return best

    def try_again(
        self, starts: Rows[Found], least: Found | None, target: int, effort: Effort
    ) -> Found | None:
        """One more try at random to bring the peak to ``target``; the smallest found so far.

        In turn from ``least``, which is taken a part of the way, and from one of ``starts``.
        """
        self.restarts += 1
        turn, step = divmod(self.restarts, 2)
        source, budget = least, target
        if step and starts:
            source = starts[turn % len(starts)]
        elif least is not None:
            way = max(0, least.peak - target) * _DESCENT[turn % len(_DESCENT)]
            budget = least.peak - math.ceil(way)
        if source is None:
            return None
        part = effort.part(0.1)
        plan = self.workers[0].repair(source.ops, budget, part, noise=_NOISE)
        effort.charge(part)
        better = plan is not None and (least is None or plan.peak < least.peak)
        return plan if better else least

    def improve(
        self,
        starts: Rows[Found],
        budget: int,
        effort: Effort,
        *,
        sources: Rows[Found] = (),
        arrivals: Callable[[], Rows[Found]] = tuple,
        enough: Callable[[Found], bool] = lambda plan: False,
    ) -> Found:
        """The fastest plan found from ``starts``, which keep ``budget``.

        Args:
            sources: plans over the budget; a worker that is stuck mends one of them at random.
            arrivals: asked at every meeting for plans that turned up meanwhile (they keep it too).
            enough: told of the best plan at every meeting; True ends the search.
        """
        ranked = self._audition(sorted(starts, key=lambda plan: plan.rank), budget, effort)
        best, fresh = ranked[0], list(ranked[WORKERS:])
        for worker, plan in zip(self.workers, (*ranked, best), strict=False):
            worker.stand_at(plan, effort.used)
        chunk = 2000 if effort.max_evaluations is None else max(1, effort.max_evaluations // 80)
        with ThreadPoolExecutor(WORKERS) as pool:
            while not effort.over and not enough(best):
                chunk = self._chunk(pool, budget, effort, chunk)
                best = min((best, *(w.best() for w in self.workers)), key=lambda plan: plan.rank)
                for plan in arrivals():
                    best = min(best, plan, key=lambda plan: plan.rank)
                    fresh.append(plan)
                for worker in self.workers:
                    if effort.used > _LAST and worker.seconds > best.seconds:
                        worker.stand_at(best, effort.used)
                    elif effort.used <= _LAST and worker.is_stuck(effort.used):
                        plan = (
                            fresh.pop()
                            if fresh
                            else self._anew(worker, best, sources, budget, effort)
                        )
                        worker.stand_at(plan, effort.used)
        return best

    def _anew(
        self, worker: Worker, best: Found, sources: Rows[Found], budget: int, effort: Effort
    ) -> Found:
        """Another start: the next of the sources, mended at random; the best plan if that fails."""
        if not sources:
            return best
        self.restarts += 1
        source, part = sources[self.restarts % len(sources)], effort.part(0.05)
        plan = worker.repair(source.ops, budget, part, best.seconds * _WORST_START, _NOISE)
        effort.charge(part)
        return plan or best

    def _audition(self, ranked: list[Found], budget: int, effort: Effort) -> list[Found]:
        """Anneal each of the first few a little; the order it leaves them in."""
        if len(ranked) <= WORKERS:
            return ranked
        tried: list[Found] = []
        for plan in ranked[:4]:
            part = effort.part(0.03)
            worker = self.workers[len(tried) % WORKERS]
            worker.stand_at(plan)
            while not part.over:
                limit = part.max_evaluations or 500
                part.spent += worker.anneal(budget, limit, plan.seconds * _HEAT / 4)
            effort.charge(part)
            tried.append(worker.best())
        return sorted(tried, key=lambda plan: plan.rank)

    def _chunk(self, pool: ThreadPoolExecutor, budget: int, effort: Effort, chunk: int) -> int:
        """Let every worker anneal ``chunk`` evaluations; how many the next chunk should have."""
        cooling = (1.0 - effort.used) ** 2
        began = time.monotonic()
        jobs = [
            pool.submit(worker.anneal, budget, chunk, worker.seconds * _HEAT * cooling)
            for worker in self.workers
        ]
        effort.spent += sum(job.result() for job in jobs)
        if effort.max_evaluations is not None:
            return chunk
        left = max(0.0, effort.deadline - time.monotonic())
        pace = min(_MEETING, left) / max(1e-4, time.monotonic() - began)
        return max(200, min(int(chunk * pace), 4 * chunk, _MOST_A_CHUNK))


def undominated(plans: Iterable[Found]) -> list[Found]:
    """The plans than which none is both faster and smaller, the smallest peak first."""
    front: list[Found] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.seconds)):
        if not front or plan.seconds < front[-1].seconds:
            front.append(plan)
    return front
