"""Nested checkpointing as starting points: forward in segments of equal bytes, one to three levels.

Chen et al. (2016) keep the values at segment borders and compute each segment again before its
backward; nested segments do the same inside a segment (Griewank and Walther's Revolve is the
limit). As a retention rule: value v, once made, is carried on from the moment ``held_from[v]``
backward ops are done. Borders of the coarse level are held from the start (0); borders of a finer
level from the backward of the coarse segment they lie in, everything else from the backward of its
finest segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from remat.solvers.compiled import compiled, inner
from remat.solvers.evaluate import (
    BACKWARD,
    END,
    PHASE,
    PINNED,
    PRODUCER,
    READS,
    RERUNNABLE,
    SIZE,
    WRITES,
    Arrays,
    Ints,
)
from remat.solvers.retention import saved_by_default
from remat.solvers.segments import Demands
from remat.solvers.structure import Structure

COUNTS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_ALWAYS: Final = 1 << 40  # made, and never dropped
_COARSE: Final = 4  # segmentations tried as the outermost of three levels


@dataclass(frozen=True)
class Segments:
    """Where forward can be cut, and the retention rules that follow."""

    structure: Structure

    @cached_property
    def rules(self) -> list[Ints]:
        """``held_from`` of every nesting: first one level, then two, then three."""
        return list(self._rules())

    def _rules(self) -> Iterator[Ints]:
        borders = self.segmentations
        yield from (self._held_from([one]) for one in borders)
        for outer, fine in itertools.product(borders, borders):
            if len(fine) >= 2 * len(outer):
                yield self._held_from([outer, fine])
        for outer, middle, fine in itertools.product(borders[:_COARSE], borders, borders):
            if len(middle) >= 3 * len(outer) and len(fine) >= 3 * len(middle):
                yield self._held_from([outer, middle, fine])

    @cached_property
    def segmentations(self) -> list[tuple[int, ...]]:
        """Different sets of borders, coarse to fine; a border lies after a forward position."""
        total = sum(self._saved_bytes)
        found = dict.fromkeys(self._borders(total / count) for count in COUNTS)
        return [borders for borders in found if borders]

    @cached_property
    def _saved_bytes(self) -> list[int]:
        """For each forward position, bytes it writes that backward needs."""
        problem = self.structure.problem
        saved = saved_by_default(problem, self.structure)
        return [
            sum(problem.values[v].bytes for v in problem.ops[op].writes if v in saved)
            for op in problem.forward
        ]

    @cached_property
    def _crossing(self) -> list[int]:
        """For each forward position, bytes alive after it for later forward ops."""
        problem = self.structure.problem
        change = [0] * (len(problem.forward) + 1)
        for v, (first, last) in enumerate(self._spans):
            if first < last:
                change[first] += problem.values[v].bytes
                change[last] -= problem.values[v].bytes
        return list(itertools.accumulate(change))

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """For each value, forward positions of its op and of its last forward reader."""
        problem, position = self.structure.problem, self.structure.position
        spans = [(0, 0)] * len(problem.values)
        for at, op in enumerate(problem.forward):
            for v in self.structure.reads[op]:
                first = position[problem.producer[v]]
                if not problem.values[v].output:
                    spans[v] = (first, at)
        return spans

    def _borders(self, most: float) -> tuple[int, ...]:
        """Cut where least crosses, once ``most`` saved bytes lie behind the last border."""
        borders: list[int] = []
        behind, options = 0, list[tuple[int, int]]()
        at, end = 0, len(self._saved_bytes)
        while at < end:
            behind += self._saved_bytes[at]
            if behind >= 0.4 * most:
                options.append((self._crossing[at], -at))
            if behind >= most and options:
                border = -min(options)[1]
                if border < end - 1 and (not borders or border > borders[-1]):
                    borders.append(border)
                at, behind, options = max(border, borders[-1] if borders else border), 0, []
            at += 1
        return tuple(borders)

    @cached_property
    def first_need(self) -> Ints:
        """For each value, how many backward ops are done when backward first needs it."""
        first = np.array(Demands.of(self.structure.problem).first, dtype=np.int64)
        return np.minimum(first, len(self.structure.problem.backward))

    def _held_from(self, levels: Rows[tuple[int, ...]]) -> Ints:
        outer, held = 0, np.ones(len(self.structure.problem.values), dtype=np.int64)
        finest = self._level(levels[-1])
        held[finest.inside] = np.maximum(1, finest.starts[finest.inside] + 1)
        for borders, around in zip(reversed(levels), (*reversed(levels[:-1]), None), strict=True):
            crosses = self._level(borders).crosses
            if around is None:
                held[crosses] = outer
            else:
                starts = np.maximum(1, self._level(around).starts + 1)
                held[crosses] = np.minimum(held, starts)[crosses]
        dropped = list(self.structure.problem.dropped)
        held[dropped] = np.maximum(1, held[dropped])
        return held

    def _level(self, borders: tuple[int, ...]) -> _Level:
        if borders not in self._levels:
            self._levels[borders] = self._new_level(np.array(borders))
        return self._levels[borders]

    @cached_property
    def _levels(self) -> dict[tuple[int, ...], _Level]:
        return {}

    def _new_level(self, borders: Ints) -> _Level:
        problem = self.structure.problem
        spans = np.array(self._spans, dtype=np.int64).reshape(-1, 2)
        inside = np.array(
            [p >= 0 and problem.ops[p].phase == "forward" for p in problem.producer], dtype=bool
        )
        positions = [self.structure.position.get(p, 0) for p in problem.producer]
        made_at = np.array(positions, dtype=np.int64)
        segment = np.searchsorted(borders, made_at)
        starts = np.full(len(borders) + 1, len(problem.backward), dtype=np.int64)
        np.minimum.at(starts, segment[inside], self.first_need[inside])
        border = np.append(borders, np.iinfo(np.int64).max)[np.searchsorted(borders, spans[:, 0])]
        return _Level(inside, starts[segment], (spans[:, 0] < spans[:, 1]) & (border < spans[:, 1]))


@dataclass(frozen=True)
class _Level:
    """One segmentation, a row for each value.

    Attributes:
        inside: a forward op makes it.
        starts: how many backward ops are done when its segment is first needed.
        crosses: a later forward op of another segment reads it.
    """

    inside: npt.NDArray[np.bool_]
    starts: Ints
    crosses: npt.NDArray[np.bool_]


@compiled
def replay_rule(
    arrays: Arrays,
    skeleton: Ints,
    outputs: Ints,
    held_from: Ints,
    made: Ints,
    stack: Ints,
    ops: Ints,
) -> int:
    """Write into ``ops`` what runs under a retention rule, by lazy demand; how many, -1: too many.

    Args:
        skeleton: forward ops, then backward ops. outputs: values to have at the end.
        made, stack: scratch, a number for each value, and room for a depth-first search.
    """
    n, position = 0, 0
    made[:] = -2
    for v in arrays.tangents:
        made[v] = _ALWAYS
    for i in range(len(skeleton) + 1):
        last = i == len(skeleton)
        op = -1 if last else skeleton[i]
        if last or arrays.op[op, PHASE] == BACKWARD:
            first = 0 if last else arrays.op[op, READS]
            end = len(outputs) if last else arrays.op[op, WRITES]
            for k in range(first, end):
                v = outputs[k] if last else arrays.operands[k]
                n = _make(arrays, held_from, made, stack, ops, n, position, v)
                if n < 0:
                    return -1
        if last:
            return n
        if n >= len(ops):
            return -1
        ops[n] = op
        n += 1
        at = -1
        if arrays.op[op, PHASE] == BACKWARD:
            at = _ALWAYS
            position += 1
        for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
            made[arrays.operands[k]] = at
    return n


@inner
def _there(arrays: Arrays, held_from: Ints, made: Ints, v: int, position: int) -> bool:
    if made[v] < -1:
        return False
    kept = arrays.value[v, PINNED] == 1 or arrays.value[v, SIZE] == 0
    producer = arrays.value[v, PRODUCER]
    if kept or producer < 0 or arrays.op[producer, RERUNNABLE] == 0:
        return True
    return bool(made[v] == position or held_from[v] <= made[v] + 1)


@inner
def _make(
    arrays: Arrays,
    held_from: Ints,
    made: Ints,
    stack: Ints,
    ops: Ints,
    n: int,
    position: int,
    v: int,
) -> int:
    """Run what is missing for ``v``, what that reads first."""
    if _there(arrays, held_from, made, v, position):
        return n
    depth = 1
    stack[0] = arrays.value[v, PRODUCER]
    while depth > 0:
        op = stack[depth - 1]
        if op < 0:
            op = -1 - op
            depth -= 1
            if n >= len(ops):
                return -1
            ops[n] = op
            n += 1
            for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
                made[arrays.operands[k]] = position
            continue
        missing = False
        for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
            missing = missing or not _there(arrays, held_from, made, arrays.operands[k], position)
        if not missing:
            depth -= 1
            continue
        stack[depth - 1] = -1 - op
        for k in range(arrays.op[op, WRITES] - 1, arrays.op[op, READS] - 1, -1):
            u = arrays.operands[k]
            if not _there(arrays, held_from, made, u, position):
                stack[depth] = arrays.value[u, PRODUCER]
                depth += 1
    return n
