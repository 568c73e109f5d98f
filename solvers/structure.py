"""What follows from a problem before any decision: who is demanded when, what cannot but be alive.

The class of schedules fixes the order of everything that runs once: forward ops, then backward ops.
``order`` is that skeleton. A value is *unavoidable* at a position of it if it is alive there in
every schedule of the class: a gradient between its op and its last read, a forward value while
later forward ops read it, an output once it was computed, and what may not be computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from remat.solvers.problem import Problem

NEVER = -1


@dataclass(frozen=True, eq=False)
class Structure:
    """The skeleton of every schedule of ``problem``.

    Attributes:
        offloads: the class is the wider one, in which a forward value may leave and come back.
    """

    problem: Problem
    offloads: bool = False

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Forward ops, then backward ops: what runs exactly once outside recomputation."""
        return self.problem.forward + self.problem.backward

    @cached_property
    def forward_end(self) -> int:
        """Position in ``order`` of the first backward op."""
        return len(self.problem.forward)

    @cached_property
    def position(self) -> dict[int, int]:
        """For each op of ``order``, where it stands."""
        return {op: at for at, op in enumerate(self.order)}

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the values it reads that the caller does not own."""
        values = self.problem.values
        return tuple(tuple(v for v in op.reads if not values[v].owned) for op in self.problem.ops)

    @cached_property
    def computed_again(self) -> tuple[bool, ...]:
        """For each value, whether backward can compute it: its op is forward or deferred."""
        ops = self.problem.ops
        return tuple(p >= 0 and ops[p].phase != "backward" for p in self.problem.producer)

    @cached_property
    def demanded_at(self) -> tuple[int, ...]:
        """For each op, the position at which a deferred op is first demanded, else NEVER.

        ``len(order)`` means at the very end: only the caller asks for what it writes.
        """
        problem, producer = self.problem, self.problem.producer
        demanded = [math.inf] * len(problem.ops)
        for v, value in enumerate(problem.values):
            if value.output and producer[v] >= 0:
                demanded[producer[v]] = len(self.order)
        for index in range(len(problem.ops) - 1, -1, -1):
            phase = problem.ops[index].phase
            if phase == "forward":
                continue
            at = self.position[index] if phase == "backward" else demanded[index]
            for v in self.reads[index]:
                if producer[v] >= 0:
                    demanded[producer[v]] = min(demanded[producer[v]], at)
        return tuple(
            int(at) if problem.ops[i].phase == "deferred" and at < math.inf else NEVER
            for i, at in enumerate(demanded)
        )

    @cached_property
    def required_again(self) -> frozenset[int]:
        """The forward ops that every schedule runs again: what they write may not be kept.

        A value that may not be kept, and that an op reads which runs in backward in any case.
        """
        problem, again = self.problem, set[int]()
        if not problem.dropped:
            return frozenset()
        pending = [
            i
            for i, op in enumerate(problem.ops)
            if op.phase == "backward" or self.demanded_at[i] != NEVER
        ]
        while pending:
            for v in self.reads[pending.pop()]:
                if not problem.values[v].keepable and problem.producer[v] not in again:
                    again.add(problem.producer[v])
                    pending.append(problem.producer[v])
        return frozenset(again)

    def runs_in_backward(self, op: int) -> bool:
        """Whether a forward or deferred op runs in the backward part of every schedule."""
        return self.demanded_at[op] != NEVER or op in self.required_again

    @cached_property
    def required_seconds(self) -> float:
        """Seconds of everything that has to run at least once, or again."""
        ops = self.problem.ops
        once = (
            op.seconds
            for i, op in enumerate(ops)
            if op.phase != "deferred" or self.demanded_at[i] != NEVER
        )
        return math.fsum((*once, *(ops[i].seconds for i in sorted(self.required_again))))

    @cached_property
    def unavoidable(self) -> tuple[tuple[int, int], ...]:
        """For each value, first and last position at which it is alive whatever the schedule.

        What a backward op reads of forward is not in here (it may have been computed again); an
        empty interval is (1, 0).
        """
        problem, end = self.problem, len(self.order) - 1
        forward_read, backward_read = self._last_reads()
        spans: list[tuple[int, int]] = []
        for v, value in enumerate(problem.values):
            producer = problem.producer[v]
            if value.owned or (producer < 0 and not value.tangent):
                spans.append((1, 0))
            elif value.tangent:
                kept = value.output or backward_read[v] < 0
                spans.append((self.forward_end, end if kept else backward_read[v]))
            else:
                spans.append(self._span(v, producer, forward_read[v], backward_read[v], end))
        return tuple(spans)

    def _span(
        self, v: int, producer: int, forward_read: int, backward_read: int, end: int
    ) -> tuple[int, int]:
        op = self.problem.ops[producer]
        start = self.demanded_at[producer] if op.phase == "deferred" else self.position[producer]
        if op.phase == "deferred" and not 0 <= start <= end:
            return (1, 0)
        if self.problem.values[v].output:
            return (start, end)
        if op.phase == "deferred":
            # It runs before the op at ``start``: what that op does not read may be gone by then.
            kept = not op.rerunnable and backward_read >= start
            return (start, backward_read) if kept else (1, 0)
        if op.phase == "backward" or not (op.rerunnable or self.may_leave(v)):
            return (start, max(forward_read, backward_read, start))
        return (start, max(forward_read, start))

    def may_leave(self, v: int) -> bool:
        """Whether the class offloads value ``v``: of a forward op, no output, free to be copied."""
        value, producer = self.problem.values[v], self.problem.producer[v]
        return (
            self.offloads
            and producer >= 0
            and self.problem.ops[producer].phase == "forward"
            and value.offloadable
            and value.keepable
            and value.output is None
            and value.bytes > 0
        )

    def _last_reads(self) -> tuple[list[int], list[int]]:
        forward = [-1] * len(self.problem.values)
        backward = [-1] * len(self.problem.values)
        for at, index in enumerate(self.order):
            last = forward if at < self.forward_end else backward
            for v in self.reads[index]:
                last[v] = at
        return forward, backward

    @cached_property
    def unavoidable_bytes(self) -> npt.NDArray[np.int64]:
        """For each position, bytes in use while its op runs, whatever the schedule."""
        problem = self.problem
        change = np.zeros(len(self.order) + 1, dtype=np.int64)
        for v, (start, end) in enumerate(self.unavoidable):
            if start <= end:
                change[start] += problem.values[v].bytes
                change[end + 1] -= problem.values[v].bytes
        used = np.cumsum(change)[:-1] + problem.fixed_bytes
        for at, index in enumerate(self.order):
            used[at] += problem.ops[index].workspace
            used[at] += sum(
                problem.values[v].bytes for v in self.reads[index] if not self.holds(v, at)
            )
        return used

    def holds(self, v: int, position: int) -> bool:
        """Whether value ``v`` is unavoidable at ``position``."""
        start, end = self.unavoidable[v]
        return start <= position <= end
