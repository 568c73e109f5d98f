"""What the simple solvers share: from a retention rule to a schedule, and where forward can be cut.

A plan is written as one number a value, ``held_from``: once computed, value v is carried on as
soon as ``held_from[v]`` backward ops are done. 0 means saved by forward; ``NEVER`` means dropped
after the backward op it was recomputed for. This is the retention map K[v, p] = [p >= held_from[v]]
of the literature; nested checkpointing (Chen's sqrt(n), Revolve) has this form. The ops that run
follow by lazy demand: before each backward op, whatever it reads and is missing is recomputed.

"Position" always means how many backward ops are done.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

from remat.solvers.demand import always_kept, missing_ops
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule

NEVER: Final = sys.maxsize


@dataclass(frozen=True)
class Demands:
    """When backward needs the values that depend on no gradient, deferred ops seen through.

    A backward op that reads what a deferred op makes needs what that op reads.

    Attributes:
        first, last: for each value the first and last position that needs it; ``NEVER`` and -1 for
            a value nobody needs. An output of a deferred op counts as needed at the end.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> Demands:
        """Demands of ``problem``; linear in the number of reads."""
        first, last = [NEVER] * len(problem.values), [-1] * len(problem.values)

        def need(v: int, earliest: int, latest: int) -> None:
            first[v], last[v] = min(first[v], earliest), max(last[v], latest)

        for position, index in enumerate(problem.backward):
            for v in problem.ops[index].reads:
                need(v, position, position)
        end = len(problem.backward)
        for index in reversed(problem.deferred):
            op = problem.ops[index]
            for v in op.writes:
                if problem.values[v].output:
                    need(v, end, end)
            earliest = min((first[v] for v in op.writes), default=NEVER)
            latest = max((last[v] for v in op.writes), default=-1)
            if latest >= 0:
                for v in op.reads:
                    need(v, earliest, latest)
        return Demands(tuple(first), tuple(last))


def replay(
    problem: Problem,
    held_from: Sequence[int],
    recompute_at: Mapping[int, Iterable[int]] | None = None,
) -> list[int]:
    """The ops that run, in order, under a retention rule.

    Args:
        held_from: see the head of this file; ignored for values that are always kept.
        recompute_at: position -> values to have there besides those the backward op reads. A
            checkpointed layer that is recomputed as a whole is written so.
    """
    return _Replay(problem, held_from, recompute_at or {}).run()


@dataclass
class _Replay:
    problem: Problem
    held_from: Sequence[int]
    recompute_at: Mapping[int, Iterable[int]]

    def run(self) -> list[int]:
        problem = self.problem
        kept, ops = always_kept(problem), problem.ops
        held = [0 if kept[v] else self.held_from[v] for v in range(len(kept))]
        for v in problem.dropped:
            held[v] = max(held[v], 1)
        present = set(problem.tangents)
        for index in problem.forward:
            present.update(v for v in ops[index].writes if held[v] <= 0)
        computes = list(problem.forward)
        for position, index in enumerate(problem.backward):
            wanted = [*ops[index].reads, *self.recompute_at.get(position, ())]
            # In program order, as the layers ran: plans of peers are compared with these.
            missing = sorted(missing_ops(problem, present, wanted))
            computes += missing
            for made in missing:
                dropped = [v for v in ops[made].writes if held[v] > position + 1]
                present.update(ops[made].writes)
                present.difference_update(dropped)
            present.update(ops[index].writes)
            computes.append(index)
        outputs = [v for v, value in enumerate(problem.values) if value.output]
        return computes + sorted(missing_ops(problem, present, outputs))


def lifetimes(problem: Problem, computes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(value, first, last) for each instance: the places in ``computes`` where it is alive.

    Args:
        computes: ops in order, the forward ones first, as :func:`replay` lists them. Between those
            and the rest the tangents arrive.
    """
    values, end = problem.values, len(computes) - 1
    first, last = [-1] * len(values), [-1] * len(values)
    if len(problem.forward) <= end:
        for v in problem.tangents:
            first[v], last[v] = len(problem.forward), end
    for place, index in enumerate(computes):
        op = problem.ops[index]
        for v in op.reads:
            last[v] = place
        for v in op.writes:
            if first[v] >= 0 and values[v].output:
                yield v, place, place  # the first instance stays; this one is dropped at once
                continue
            if first[v] >= 0:
                yield v, first[v], last[v]
            first[v] = last[v] = place
    for v, value in enumerate(values):
        if first[v] >= 0:
            yield v, first[v], end if value.output else last[v]


def profile(problem: Problem, computes: Sequence[int]) -> list[int]:
    """Bytes in use while each of ``computes`` runs, as the judge counts them."""
    change = [0] * (len(computes) + 1)
    for place, index in enumerate(computes):
        change[place] += problem.ops[index].workspace
        change[place + 1] -= problem.ops[index].workspace
    for v, first, last in lifetimes(problem, computes):
        change[first] += problem.values[v].bytes
        change[last + 1] -= problem.values[v].bytes
    return list(accumulate(change[:-1], initial=problem.fixed_bytes))[1:]


@dataclass(frozen=True)
class Candidate:
    """A sequence of ops with its peak (bytes) and seconds."""

    problem: Problem
    computes: tuple[int, ...]
    bytes: tuple[int, ...]

    @staticmethod
    def of(problem: Problem, computes: Sequence[int]) -> Candidate:
        """Work out what running ``computes`` takes."""
        return Candidate(problem, tuple(computes), tuple(profile(problem, computes)))

    @property
    def peak(self) -> int:
        """Bytes; see :attr:`Timeline.peak`."""
        return max(self.bytes, default=self.problem.fixed_bytes)

    @cached_property
    def seconds(self) -> float:
        """Of the whole step."""
        return math.fsum(self.problem.ops[index].seconds for index in self.computes)

    @property
    def schedule(self) -> Schedule:
        """The schedule that frees every value after its last read."""
        return Schedule.from_computes(self.problem, self.computes)

    def rank(self, memory_budget: int | None) -> tuple[bool, float, float]:
        """Sorts plans that fit by seconds before plans that do not by peak."""
        if memory_budget is None or self.peak <= memory_budget:
            return (False, self.seconds, self.peak)
        return (True, self.peak, self.seconds)


def save_all(problem: Problem) -> Candidate:
    """Every op that is demanded runs once, every value is kept to its last read."""
    return Candidate.of(problem, replay(problem, [0] * len(problem.values)))


@dataclass(frozen=True)
class Crossings:
    """Which values cross from one forward op to the next.

    Attributes:
        made, last_read: for each value, the forward position (index into ``Problem.forward``) that
            makes it and the last that reads it; -1 for none.
    """

    problem: Problem
    made: tuple[int, ...]
    last_read: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> Crossings:
        """Crossings of ``problem``."""
        made, last_read = [-1] * len(problem.values), [-1] * len(problem.values)
        for position, index in enumerate(problem.forward):
            for v in problem.ops[index].writes:
                made[v] = position
            for v in problem.ops[index].reads:
                last_read[v] = position
        return Crossings(problem, tuple(made), tuple(last_read))

    def at(self, position: int) -> list[int]:
        """Forward values made at or before ``position`` and read after it."""
        return [
            v
            for v, (made, last) in enumerate(zip(self.made, self.last_read, strict=True))
            if 0 <= made <= position < last
        ]

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """For each forward position, the bytes that :meth:`at` would save, outputs left out."""
        change = [0] * (len(self.problem.forward) + 1)
        for v, (made, last) in enumerate(zip(self.made, self.last_read, strict=True)):
            if 0 <= made < last and not self.problem.values[v].output:
                change[made] += self.problem.values[v].bytes
                change[last] -= self.problem.values[v].bytes
        total, running = [], 0
        for delta in change[:-1]:
            running += delta
            total.append(running)
        return tuple(total)
