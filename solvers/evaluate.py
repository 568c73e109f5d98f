"""The compiled evaluator: seconds and bytes of a sequence of ops, and of small changes to it.

A *sequence* is what runs, in order: forward ops, then backward ops with recomputations between
them. Any sequence whose reads are computed somewhere before is a schedule: a value is held from the
op that writes it to the last read before it is written again (``Schedule.from_computes``), so a
sequence decides everything. The judge (``simulate.py``) defines what the figures mean; tests hold
this file equal to it.

Every operand of every op in the sequence is a *touch*. The touches of one value are linked in
order. Between a touch and the next one, unless that is a write, the value is alive: a *gap*. Bytes
in use at a position are those of the gaps that span or end there, plus what its op writes, plus its
workspace.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solvers.compiled import compiled, inner
from remat.solvers.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FORWARD: Final = 0
DEFERRED: Final = 1
BACKWARD: Final = 2

BLOCK: Final = 64  # positions whose maximum is kept together
RANGES: Final = 96  # most ranges one change of a sequence may have

# Columns of the tables: arrays with one row a thing, so that few arrays cross a compiled call.
READS, WRITES, END, PHASE, RERUNNABLE, WORKSPACE = range(6)  # Arrays.op
SIZE, PRODUCER, PINNED, KEEPABLE = range(4)  # Arrays.value
POSITION, VALUE, WRITE, PREVIOUS, NEXT = range(5)  # Sequence.touch
TOUCHES, AGAIN = range(2)  # Sequence.place
LENGTH, BOUNDARY, PEAK, PEAK_POSITION = range(4)  # Sequence.facts


class Arrays(NamedTuple):
    """A problem as arrays.

    Attributes:
        op: a row for each op: READS, WRITES, END are places in ``operands``, where its reads and
            then its writes stand (owned values are left out).
        value: a row for each value; PRODUCER is -1 where nobody writes it.
        fixed, forward_count: bytes alive throughout; how many forward ops there are.
    """

    op: Ints
    seconds: Floats
    operands: Ints
    value: Ints
    tangents: Ints
    fixed: int
    forward_count: int


class Sequence(NamedTuple):
    """A sequence of ops and everything ``analyse`` derives from it. Buffers, used from the front.

    Attributes:
        ops: what runs, in order; ``facts[LENGTH]`` of them.
        facts: BOUNDARY is the position of the first op of the backward part.
        seconds: one number, of everything that runs.
        touch: see the head of this file; NEXT and PREVIOUS are -1 at the ends.
        place: a row for each position: TOUCHES is where its touches start, reads first; AGAIN
            whether its op ran before.
        before, used: for each position, bytes alive just before it runs, and while it runs.
        block: the most bytes in use in each BLOCK of positions.
        last: the last touch of each value; scratch: a number for each op or value.
    """

    ops: Ints
    facts: Ints
    seconds: Floats
    touch: Ints
    place: Ints
    before: Ints
    used: Ints
    block: Ints
    last: Ints
    scratch: Ints


def arrays_of(problem: Problem) -> Arrays:
    """The arrays of ``problem``."""
    values, phases = (
        problem.values,
        {"forward": FORWARD, "deferred": DEFERRED, "backward": BACKWARD},
    )
    operands: list[int] = []
    table = np.zeros((len(problem.ops), 6), dtype=np.int64)
    for index, op in enumerate(problem.ops):
        first = len(operands)
        operands += [v for v in op.reads if not values[v].owned]
        middle = len(operands)
        operands += op.writes
        again = op.rerunnable and op.phase != "backward"
        table[index] = (first, middle, len(operands), phases[op.phase], again, op.workspace)
    rows = [
        (value.bytes, producer, value.output is not None, value.keepable)
        for value, producer in zip(values, problem.producer, strict=True)
    ]
    return Arrays(
        op=table,
        seconds=np.array([op.seconds for op in problem.ops], dtype=np.float64),
        operands=np.array(operands, dtype=np.int64),
        value=np.array(rows, dtype=np.int64).reshape(len(values), 4),
        tangents=np.array(problem.tangents, dtype=np.int64),
        fixed=problem.fixed_bytes,
        forward_count=len(problem.forward),
    )


def new_sequence(arrays: Arrays) -> Sequence:
    """Room for a sequence of five times the ops of the problem, and at least a few thousand."""
    capacity = max(4096, 5 * len(arrays.op))
    return Sequence(
        ops=np.zeros(capacity, dtype=np.int64),
        facts=np.zeros(4, dtype=np.int64),
        seconds=np.zeros(1, dtype=np.float64),
        touch=np.zeros((max(4 * 4096, 5 * len(arrays.operands)), 5), dtype=np.int64),
        place=np.zeros((capacity + 1, 2), dtype=np.int64),
        before=np.zeros(capacity + 2, dtype=np.int64),
        used=np.zeros(capacity, dtype=np.int64),
        block=np.zeros(capacity // BLOCK + 2, dtype=np.int64),
        last=np.zeros(len(arrays.value), dtype=np.int64),
        scratch=np.zeros(max(len(arrays.op), len(arrays.value), 1), dtype=np.int64),
    )


@inner
def copy_front(to: Ints, source: Ints, count: int) -> None:
    """Copy the first ``count`` numbers."""
    for i in range(count):
        to[i] = source[i]


@compiled
def load(arrays: Arrays, s: Sequence, ops: Ints, length: int) -> bool:
    """Analyse the sequence ``ops[:length]``; False if it does not fit into the room there is."""
    touches = 0
    for p in range(length):
        touches += arrays.op[ops[p], END] - arrays.op[ops[p], READS]
    if length > len(s.ops) or touches > len(s.touch):
        return False
    copy_front(s.ops, ops, length)
    s.facts[LENGTH] = length
    analyse(arrays, s)
    return True


@compiled
def analyse(arrays: Arrays, s: Sequence) -> None:
    """Drop what is useless, link the touches, count bytes and seconds."""
    mark_again(s)
    drop_useless(arrays, s)
    mark_again(s)
    link_touches(arrays, s)
    count_bytes(arrays, s)


@inner
def mark_again(s: Sequence) -> None:
    """Note for each position whether its op has run before."""
    s.scratch[:] = 0
    for p in range(s.facts[LENGTH]):
        s.place[p, AGAIN] = s.scratch[s.ops[p]]
        s.scratch[s.ops[p]] = 1


@inner
def drop_useless(arrays: Arrays, s: Sequence) -> None:
    """Take out recomputations whose results nobody reads, and those that only served them."""
    n, wanted = s.facts[LENGTH], s.scratch
    wanted[:] = 0
    to = n
    for p in range(n - 1, -1, -1):
        op = s.ops[p]
        reads, writes, end = arrays.op[op, READS], arrays.op[op, WRITES], arrays.op[op, END]
        useful = s.place[p, AGAIN] == 0
        for k in range(writes, end):
            v = arrays.operands[k]
            useful = useful or (wanted[v] == 1 and arrays.value[v, PINNED] == 0)
        if useful:
            for k in range(reads, end):
                wanted[arrays.operands[k]] = k < writes
            to -= 1
            s.ops[to] = op
    if to > 0:
        for p in range(to, n):
            s.ops[p - to] = s.ops[p]
        s.facts[LENGTH] = n - to


@inner
def link_touches(arrays: Arrays, s: Sequence) -> None:
    """Fill ``touch``, ``last``, the boundary and the seconds."""
    s.last[:] = -1
    t, seconds, boundary = 0, 0.0, 0
    for p in range(s.facts[LENGTH]):
        op = s.ops[p]
        seconds += arrays.seconds[op]
        if arrays.op[op, PHASE] == FORWARD and s.place[p, AGAIN] == 0:
            boundary = p + 1
        s.place[p, TOUCHES] = t
        for k in range(arrays.op[op, READS], arrays.op[op, END]):
            v = arrays.operands[k]
            before = s.last[v]
            row = s.touch[t]
            row[POSITION] = p
            row[VALUE] = v
            row[WRITE] = k >= arrays.op[op, WRITES]
            row[PREVIOUS] = before
            row[NEXT] = -1
            if before >= 0:
                s.touch[before, NEXT] = t
            s.last[v] = t
            t += 1
    s.place[s.facts[LENGTH], TOUCHES] = t
    s.facts[BOUNDARY] = boundary
    s.seconds[0] = seconds


@inner
def count_bytes(arrays: Arrays, s: Sequence) -> None:
    """Fill ``before``, ``used``, ``block`` and the peak."""
    n = s.facts[LENGTH]
    _count_changes(arrays, s)
    alive = arrays.fixed
    peak, at = arrays.fixed, -1
    s.block[: n // BLOCK + 1] = 0
    for p in range(n):
        alive += s.before[p]
        s.before[p] = alive
        op = s.ops[p]
        used = alive + arrays.op[op, WORKSPACE]
        for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
            used += arrays.value[arrays.operands[k], SIZE]
        s.used[p] = used
        s.block[p // BLOCK] = max(s.block[p // BLOCK], used)
        if used > peak or at < 0:
            peak, at = max(used, peak), p
    s.facts[PEAK] = peak
    s.facts[PEAK_POSITION] = at


@inner
def _count_changes(arrays: Arrays, s: Sequence) -> None:
    """``before`` as differences: the bytes that come to life or die just before each position."""
    n, boundary = s.facts[LENGTH], s.facts[BOUNDARY]
    s.before[: n + 2] = 0
    for k in range(s.place[n, TOUCHES]):
        v, following = s.touch[k, VALUE], s.touch[k, NEXT]
        if arrays.value[v, PINNED]:
            if s.touch[k, WRITE] and s.touch[k, PREVIOUS] < 0:
                s.before[s.touch[k, POSITION] + 1] += arrays.value[v, SIZE]
        elif following >= 0 and s.touch[following, WRITE] == 0:
            s.before[s.touch[k, POSITION] + 1] += arrays.value[v, SIZE]
            s.before[s.touch[following, POSITION] + 1] -= arrays.value[v, SIZE]
    for v in arrays.tangents:  # alive from the boundary; the gaps between its reads are counted
        s.before[boundary] += arrays.value[v, SIZE]
        k = s.last[v]
        if arrays.value[v, PINNED] == 0 and k >= 0:
            while s.touch[k, PREVIOUS] >= 0:
                k = s.touch[k, PREVIOUS]
            s.before[s.touch[k, POSITION] + 1] -= arrays.value[v, SIZE]


@inner
def highest(s: Sequence, first: int, last: int) -> int:
    """The most bytes in use at positions ``first`` to ``last``, both included; 0 if none."""
    best = 0
    p = first
    while p <= last:
        if p % BLOCK == 0 and p + BLOCK - 1 <= last:
            best = max(best, s.block[p // BLOCK])
            p += BLOCK
        else:
            best = max(best, s.used[p])
            p += 1
    return best


@inner
def excess(s: Sequence, first: int, last: int, shift: int, budget: int) -> int:
    """Sum over positions of the bytes above ``budget`` if ``shift`` bytes were added to each."""
    total = 0
    p = first
    while p <= last:
        if p % BLOCK == 0 and p + BLOCK - 1 <= last and s.block[p // BLOCK] + shift <= budget:
            p += BLOCK
        else:
            total += max(0, s.used[p] + shift - budget)
            p += 1
    return total


class Ranges(NamedTuple):
    """Changes of the bytes in use: ``amount[i]`` is added at positions ``first[i]..last[i]``.

    ``size`` holds how many there are; ``corner`` and ``step`` are scratch.
    """

    size: Ints
    first: Ints
    last: Ints
    amount: Ints
    corner: Ints
    step: Ints


def new_ranges() -> Ranges:
    """No ranges, with room for RANGES of them."""
    room, corners = np.zeros(RANGES, dtype=np.int64), np.zeros(2 * RANGES, dtype=np.int64)
    return Ranges(
        np.zeros(1, dtype=np.int64), room, room.copy(), room.copy(), corners, corners.copy()
    )


@inner
def add_range(ranges: Ranges, first: int, last: int, amount: int) -> bool:
    """Note a change; False if there is no room left for it."""
    if last < first or amount == 0:
        return True
    i = ranges.size[0]
    if i >= RANGES:
        return False
    ranges.first[i] = first
    ranges.last[i] = last
    ranges.amount[i] = amount
    ranges.size[0] = i + 1
    return True


@compiled
def judge_ranges(s: Sequence, ranges: Ranges, budget: int) -> tuple[int, int]:
    """(peak, change of the excess) of the sequence with the ranges applied."""
    corner, step, corners = ranges.corner, ranges.step, 0
    for i in range(ranges.size[0]):
        for end in range(2):
            at = ranges.first[i] if end == 0 else ranges.last[i] + 1
            amount = ranges.amount[i] if end == 0 else -ranges.amount[i]
            j = corners
            while j > 0 and corner[j - 1] > at:
                corner[j] = corner[j - 1]
                step[j] = step[j - 1]
                j -= 1
            corner[j] = at
            step[j] = amount
            corners += 1
    peak, change, shift, at = 0, 0, 0, 0
    for j in range(corners + 1):
        until = corner[j] if j < corners else s.facts[LENGTH]
        if until > at:
            top = highest(s, at, until - 1)
            peak = max(peak, top + shift)
            if shift != 0 and (top > budget or top + shift > budget):
                change += excess(s, at, until - 1, shift, budget) - excess(
                    s, at, until - 1, 0, budget
                )
            at = until
        if j < corners:
            shift += step[j]
    return peak, change
