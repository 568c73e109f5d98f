"""From decisions to a schedule with transfers: what leaves when, and when it comes back.

Given the ops that run, in order (``computes``), and the values to offload, the rules are fixed.

*Out.* A copy starts right after the op that writes the value, in the order of those ops. The value
is freed once the copy is done and forward has read it for the last time. Computation waits for that
only where the next op would exceed the budget otherwise.

*Back.* Reloads run in the order of need. A reload starts as late as it can without holding up an
op, the reloads after it included: going back from the last, ``done = min(need, start of the next)``
and ``start = done - its seconds``, on the clock of computation alone (waiting only gives the link
more time). ``lead`` seconds earlier where memory allows. It starts only if everything up to its
first reader fits the budget with it; if that moment never comes, the reader waits for it.

A value in ``returning`` is freed after every reader and comes back for the next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Step, StepKind
from remat.solvers.segments import lifetimes
from remat.solvers.structure import Structure

_UNBOUNDED: Final = 2**62


@dataclass(frozen=True, slots=True)
class Stay:
    """A value from forward that backward reads: positions in ``computes``.

    Attributes:
        written, last_forward: the op that writes it, the last forward op that touches it.
        readers: the ops of backward that read this instance, in order; at least one.
    """

    written: int
    last_forward: int
    readers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """A sequence of ops without transfers, taken apart once for many sets of offloaded values.

    Attributes:
        boundary: position of the first op of the backward part.
        clock: seconds at which each op starts if nothing waits; one more for the end.
        used: bytes while each op runs, everything that stays staying; at least those just before
            it, when a reload may begin.
        stays: for every value that may leave and that backward reads from forward, its stay.
    """

    structure: Structure
    computes: tuple[int, ...]
    boundary: int
    clock: tuple[float, ...]
    used: npt.NDArray[np.int64]
    stays: dict[int, Stay]

    @staticmethod
    def of(structure: Structure, computes: Sequence[int]) -> Trace:
        """Take ``computes`` apart: the ops of a valid schedule, in order.

        Args:
            structure: of the class with offloading.
        """
        problem = structure.problem
        boundary = _boundary(problem, computes)
        clock = np.zeros(len(computes) + 1)
        np.cumsum([problem.ops[index].seconds for index in computes], out=clock[1:])
        used = np.zeros(len(computes) + 1, dtype=np.int64)
        used[:-1] = [_workspace(problem, index) for index in computes]
        change = np.zeros(len(computes) + 1, dtype=np.int64)
        for v, first, last in lifetimes(problem, computes):
            change[first] += problem.values[v].bytes
            change[last + 1] -= problem.values[v].bytes
        used += np.cumsum(change) + problem.fixed_bytes
        stays = _stays(structure, computes, boundary)
        return Trace(structure, tuple(computes), boundary, tuple(clock.tolist()), used[:-1], stays)

    @property
    def problem(self) -> Problem:
        return self.structure.problem


def _workspace(problem: Problem, index: int) -> int:
    """Of an op; one that writes over more than it writes took those bytes until it ran."""
    op = problem.ops[index]
    return max(op.workspace, -sum(problem.values[v].bytes for v in op.writes))


def _boundary(problem: Problem, computes: Sequence[int]) -> int:
    left = len(problem.forward)
    for position, index in enumerate(computes):
        if left == 0:
            return position
        left -= problem.ops[index].phase == "forward"
    return len(computes)


def _stays(structure: Structure, computes: Sequence[int], boundary: int) -> dict[int, Stay]:
    problem = structure.problem
    written: dict[int, int] = {}
    last: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    again: set[int] = set()
    for position, index in enumerate(computes):
        op = problem.ops[index]
        for v in op.reads:
            if position < boundary:
                last[v] = position
            elif v in written and v not in again:
                readers.setdefault(v, []).append(position)
        for v in op.writes:
            if position < boundary:
                written[v] = last[v] = position
            else:
                again.add(v)
    return {
        v: Stay(written[v], last[v], tuple(places))
        for v, places in readers.items()
        if structure.may_leave(v)
    }


@dataclass(frozen=True, slots=True)
class Visit:
    """One return of a value, in positions of ``computes``.

    Attributes:
        first, last: it is read at both, and there in between.
        after: the last reader of the visit before, or -1.
    """

    value: int
    first: int
    last: int
    after: int


class Transfers:
    """What the rules of this file make of a trace and the values to offload.

    Attributes:
        offloaded: the values that leave, in the order their copies start.
        visits: their returns, in the order of need; ``back_at``: for each, the position before
            whose op its reload starts.
        freed_at: for each value, the position before whose op it was freed.
        seconds: of the step, waits included; ``waits``: of these, those for transfers.
        used: bytes while each op runs.
        returning: values that come back for every reader.
        late: values that were not gone before they were needed: they should be left out.
    """

    def __init__(
        self,
        trace: Trace,
        offloaded: Iterable[int],
        link: Link,
        memory_budget: int | None,
        *,
        returning: Collection[int] = (),
        lead: float = 0.0,
    ) -> None:
        self.trace, self.link, self.lead = trace, link, lead
        self.returning = frozenset(returning)
        self.values = trace.problem.values
        self.memory_budget = _UNBOUNDED if memory_budget is None else memory_budget
        self.offloaded = sorted(offloaded, key=lambda v: (trace.stays[v].written, v))
        self.visits = _visits(trace, self.offloaded, self.returning)
        self.used = self._bytes_without()
        self.seconds = self.waits = 0.0
        self.before: dict[int, list[Step]] = {}
        self.freed_at: dict[int, int] = {}
        self.back_at = [-1] * len(self.visits)
        self.late: set[int] = set()
        self._on_entry = 0
        self._run()

    @property
    def peak(self) -> int:
        """Bytes; see :attr:`Timeline.peak`."""
        most = int(self.used.max(initial=0))
        return max(most, self._on_entry, self.trace.problem.fixed_bytes)

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts plans by seconds, then by peak."""
        return self.seconds, self.peak

    def _run(self) -> None:
        """Follow the clock through the trace."""
        trace = self.trace
        self._due = self._latest_starts()
        self._starts = _by_position((trace.stays[v].written, v) for v in self.offloaded)
        self._ripe = _by_position((trace.stays[v].last_forward, v) for v in self.offloaded)
        self._needed = _by_position((visit.first, k) for k, visit in enumerate(self.visits))
        self._next = 0
        self._out_free_at = self._back_free_at = 0.0
        self._out_done: dict[int, float] = {}
        self._back_done: dict[int, float] = {}
        self._leaving: list[tuple[float, int]] = []  # not read any more, copied or being copied
        self._leaving_bytes = 0
        for position, index in enumerate(trace.computes):
            if position == trace.boundary:
                self._on_entry = self._bytes_on_entry(position)
            self._free_copied(position)
            self._start_reloads(position)
            self._wait_for_reloads(position)
            self.used[position] += self._leaving_bytes
            self.seconds += trace.problem.ops[index].seconds
            self._start_copies(position)

    def _bytes_without(self) -> npt.NDArray[np.int64]:
        """Bytes of the trace, less what is away between its last forward reader and its visits."""
        change = np.zeros(len(self.trace.used) + 1, dtype=np.int64)
        for v in self.offloaded:
            stay, size = self.trace.stays[v], self.values[v].bytes
            change[stay.last_forward + 1] -= size
            change[stay.readers[-1] + 1] += size
        for visit in self.visits:
            change[visit.first] += self.values[visit.value].bytes
            change[visit.last + 1] -= self.values[visit.value].bytes
        return np.asarray(self.trace.used + np.cumsum(change)[:-1])

    def _bytes_on_entry(self, position: int) -> int:
        """Bytes as backward begins: gradients have arrived, and what leaves is not gone yet."""
        problem, index = self.trace.problem, self.trace.computes[position]
        made = sum(problem.values[v].bytes for v in problem.ops[index].writes)
        of_op = made + _workspace(problem, index)
        return int(self.used[position]) - of_op + self._leaving_bytes

    def _latest_starts(self) -> list[float]:
        """For each visit, when its reload has to start at the latest, on the clock of the trace."""
        starts, following = [0.0] * len(self.visits), math.inf
        for k in range(len(self.visits) - 1, -1, -1):
            needed = min(self.trace.clock[self.visits[k].first], following)
            starts[k] = following = needed - self._seconds_back(self.visits[k].value)
        return starts

    def _seconds_back(self, v: int) -> float:
        return self.link.seconds_back(self.values[v].bytes)

    def _add(self, position: int, kind: StepKind, v: int) -> None:
        self.before.setdefault(position, []).append(Step(kind, v))

    def _start_copies(self, position: int) -> None:
        """After the op: what it wrote starts to leave; what it was the last to read may go."""
        for v in self._starts.get(position, ()):
            start = max(self.seconds, self._out_free_at)
            self._out_free_at = start + self.link.seconds_out(self.values[v].bytes)
            self._out_done[v] = self._out_free_at
            self._add(position + 1, "offload", v)
        for v in self._ripe.get(position, ()):
            heapq.heappush(self._leaving, (self._out_done[v], v))
            self._leaving_bytes += self.values[v].bytes

    def _free_copied(self, position: int) -> None:
        """Free what is copied; where the op has no room otherwise, wait for what is under way."""
        while self._leaving:
            done, v = self._leaving[0]
            crowded = int(self.used[position]) + self._leaving_bytes > self.memory_budget
            if done > self.seconds and not crowded:
                return
            heapq.heappop(self._leaving)
            self._wait_until(done)
            self._leaving_bytes -= self.values[v].bytes
            self.freed_at[v] = position
            self._add(position, "wait", v)
            self._add(position, "free", v)

    def _wait_until(self, done: float) -> None:
        self.waits += max(0.0, done - self.seconds)
        self.seconds = max(self.seconds, done)

    def _start_reloads(self, position: int) -> None:
        """Start, in order, the reloads that must start before the next op and that have room."""
        while self._next < len(self.visits):
            k, visit = self._next, self.visits[self._next]
            if self.freed_at.get(visit.value, visit.first) < visit.first:
                if visit.first > position and not self._may_start(k, position):
                    return
                start = max(self.seconds, self._back_free_at)
                self._back_free_at = start + self._seconds_back(visit.value)
                self._back_done[k] = self._back_free_at
                self.back_at[k] = position
                self.used[position : visit.first] += self.values[visit.value].bytes
                self._add(position, "reload", visit.value)
            elif visit.first > position:
                return
            else:
                self.late.add(visit.value)
            self._next += 1

    def _may_start(self, k: int, position: int) -> bool:
        visit, early = self.visits[k], max(self.trace.boundary, self.visits[k].after + 1)
        if position < early or self._due[k] - self.lead >= self.trace.clock[position + 1]:
            return False
        most = int(self.used[position : visit.first].max()) + self._leaving_bytes
        return most + self.values[visit.value].bytes <= self.memory_budget

    def _wait_for_reloads(self, position: int) -> None:
        for k in self._needed.get(position, ()):
            if k in self._back_done:
                self._wait_until(self._back_done[k])
                self._add(position, "wait", self.visits[k].value)

    def schedule(self) -> Schedule:
        """The steps: those of the ops and their frees, and the transfers."""
        plain = iter(Schedule.from_computes(self.trace.problem, self.trace.computes).steps)
        ends = _by_position((visit.last, visit.value) for visit in self.visits)
        steps: list[Step] = []
        gone = set()
        at = -1
        for step in plain:
            if step.kind == "compute":
                at += 1
                steps += self.before.get(at, ())
                gone = set(ends.get(at, ()))
                steps.append(step)
                steps += (Step("free", v) for v in ends.get(at, ()))
            elif step.index not in gone:
                steps.append(step)
        return Schedule(tuple(steps))


def with_transfers(
    trace: Trace,
    offloaded: Collection[int],
    link: Link,
    memory_budget: int | None,
    *,
    returning: Collection[int] = (),
    lead: float = 0.0,
) -> Transfers:
    """:class:`Transfers` of those of ``offloaded`` that are gone before they are needed again."""
    chosen = {v for v in offloaded if v in trace.stays}
    while True:
        found = Transfers(trace, chosen, link, memory_budget, returning=returning, lead=lead)
        if not found.late:
            return found
        chosen -= found.late


def _visits(trace: Trace, offloaded: Iterable[int], returning: Collection[int]) -> list[Visit]:
    visits: list[Visit] = []
    for v in offloaded:
        readers = trace.stays[v].readers
        first, after = readers[0], -1
        for reader, following in zip(readers, (*readers[1:], None), strict=True):
            if following is None or (v in returning and following > reader + 1):
                visits.append(Visit(v, first, reader, after))
                first, after = following or -1, reader
    return sorted(visits, key=lambda visit: (visit.first, visit.value))


def _by_position(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for position, item in pairs:
        found.setdefault(position, []).append(item)
    return found
