"""The two moves of the search, priced without running them: evict a value, retain a value.

*Evict* cuts a gap of a value (``evaluate.py``): it is dropped after the touch before the gap and
made again just before the touch after it. What making it reads is either still there, or is *held*
there from its last touch on, or is made again too, and so on down: the *chain*.

*Retain* takes a recomputation out: what it wrote is held from its touch before, what it read is
freed earlier, and recomputations that only served it go as well.

Prices are exact but for rare cases (a chain that writes a second output of an op while the first is
read inside the chain; positions that vanish); the sequence itself is analysed again after every
move.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from remat.solvers.compiled import inner
from remat.solvers.evaluate import (
    AGAIN,
    BOUNDARY,
    END,
    KEEPABLE,
    LENGTH,
    NEXT,
    PINNED,
    POSITION,
    PREVIOUS,
    PRODUCER,
    READS,
    RERUNNABLE,
    SIZE,
    TOUCHES,
    VALUE,
    WORKSPACE,
    WRITE,
    WRITES,
    Arrays,
    Ints,
    Ranges,
    Sequence,
    add_range,
    analyse,
    highest,
    judge_ranges,
    new_ranges,
)

# How a chain gets what it reads and is not there.
FIT: Final = 0  # hold it if that fits the budget, else make it again
MAKE: Final = 1  # make it again
HOLD: Final = 2  # hold it

STAMP, CHAIN, HELD, EVALUATIONS = range(4)  # Scratch.facts
DECIDED, LAST_USE, KEPT = range(3)  # Scratch.value
_PLACED, _ON_CHAIN, _STAYS = 0, 1, 1 << 60

IMPOSSIBLE: Final = -1.0


class Scratch(NamedTuple):
    """Room to price a move in. ``chain``: the ops of the last chain built, in order.

    ``op``, ``place`` and column DECIDED of ``value`` hold the stamp of the move that marked them.
    """

    facts: Ints
    chain: Ints
    stack: Ints
    op: Ints
    place: Ints
    value: Ints
    ranges: Ranges


def new_scratch(arrays: Arrays, s: Sequence) -> Scratch:
    """Room to price moves of ``s``."""
    capacity = len(s.ops)
    return Scratch(
        facts=np.zeros(4, dtype=np.int64),
        chain=np.zeros(len(arrays.op) + 1, dtype=np.int64),
        stack=np.zeros(2 * len(arrays.operands) + capacity + 2, dtype=np.int64),
        op=np.zeros(len(arrays.op), dtype=np.int64),
        place=np.zeros(capacity + 1, dtype=np.int64),
        value=np.zeros((len(arrays.value), 3), dtype=np.int64),
        ranges=new_ranges(),
    )


@inner
def build_chain(
    arrays: Arrays, s: Sequence, w: Scratch, gap_end: int, mode: int, budget: int, most: float
) -> float:
    """Seconds of the chain that makes the value of touch ``gap_end`` just before it.

    Leaves the chain in ``w.chain`` and what it changes before it in ``w.ranges``. IMPOSSIBLE if the
    chain takes more than ``most`` seconds or holds too much.
    """
    at, v = s.touch[gap_end, POSITION], s.touch[gap_end, VALUE]
    since = s.touch[s.touch[gap_end, PREVIOUS], POSITION]
    w.facts[STAMP] += 1
    w.facts[CHAIN] = 0
    w.facts[HELD] = 0
    w.ranges.size[0] = 0
    add_range(w.ranges, since + 1, at - 1, -arrays.value[v, SIZE])
    stamp, seconds, depth = w.facts[STAMP], 0.0, 1
    w.stack[0] = arrays.value[v, PRODUCER]
    while depth > 0:
        op = w.stack[depth - 1]
        if op < 0:
            w.chain[w.facts[CHAIN]] = -1 - op
            w.facts[CHAIN] += 1
            depth -= 1
        elif w.op[op] == stamp:
            depth -= 1
        else:
            w.op[op] = stamp
            w.stack[depth - 1] = -1 - op
            seconds += arrays.seconds[op]
            if arrays.op[op, RERUNNABLE] == 0 or seconds > most:
                return IMPOSSIBLE
            depth = _gather_reads(arrays, s, w, gap_end, op, depth, mode, budget)
            if depth < 0:
                return IMPOSSIBLE
    return seconds


@inner
def _gather_reads(
    arrays: Arrays,
    s: Sequence,
    w: Scratch,
    gap_end: int,
    op: int,
    depth: int,
    mode: int,
    budget: int,
) -> int:
    """Decide for what ``op`` reads: there, held, or (pushed on the stack) made again."""
    at, stamp = s.touch[gap_end, POSITION], w.facts[STAMP]
    for k in range(arrays.op[op, WRITES] - 1, arrays.op[op, READS] - 1, -1):
        u = arrays.operands[k]
        if w.value[u, DECIDED] == stamp or arrays.value[u, PINNED]:
            continue
        t = s.last[u]
        while s.touch[t, POSITION] >= at:
            t = s.touch[t, PREVIOUS]
        following = s.touch[t, NEXT]
        if following >= 0 and s.touch[following, WRITE] == 0:
            w.value[u, DECIDED] = stamp
            w.value[u, KEPT] = 0
            continue
        size, producer = arrays.value[u, SIZE], arrays.value[u, PRODUCER]
        first = s.touch[t, POSITION] + 1
        hold = mode == HOLD or size == 0 or arrays.op[producer, RERUNNABLE] == 0
        if _is_dropped(arrays, s, u, t):
            hold = False
        elif not hold and mode == FIT:
            hold = _fits(arrays, s, w, gap_end, first, size, budget)
        if hold:
            w.value[u, DECIDED] = stamp
            w.value[u, KEPT] = 1
            w.facts[HELD] += size
            if not add_range(w.ranges, first, at - 1, size):
                return -1
        elif w.op[producer] != stamp:
            w.stack[depth] = producer
            depth += 1
    return depth


@inner
def _is_dropped(arrays: Arrays, s: Sequence, v: int, touch: int) -> bool:
    """Whether ``v`` may not be held on from ``touch``: it may not be there as backward starts."""
    return bool(arrays.value[v, KEEPABLE] == 0 and s.touch[touch, POSITION] < s.facts[BOUNDARY])


@inner
def _fits(
    arrays: Arrays, s: Sequence, w: Scratch, gap_end: int, first: int, size: int, budget: int
) -> bool:
    """Whether ``size`` more bytes from ``first`` to the gap's end keep the budget."""
    at, v = s.touch[gap_end, POSITION], s.touch[gap_end, VALUE]
    since = s.touch[s.touch[gap_end, PREVIOUS], POSITION]
    room = budget - size - w.facts[HELD]
    inside = max(first, since + 1)
    if highest(s, inside, at - 1) - arrays.value[v, SIZE] > room:
        return False
    return bool(first >= inside or highest(s, first, inside - 1) <= room)


@inner
def judge_evict(
    arrays: Arrays, s: Sequence, w: Scratch, gap_end: int, budget: int
) -> tuple[int, int]:
    """(peak, change of the excess over ``budget``) with the chain that was just built."""
    top, over = _judge_chain(arrays, s, w, gap_end, budget)
    peak, change = judge_ranges(s, w.ranges, budget)
    w.facts[EVALUATIONS] += 1
    return max(peak, top), change + over


@inner
def _judge_chain(
    arrays: Arrays, s: Sequence, w: Scratch, gap_end: int, budget: int
) -> tuple[int, int]:
    at, v, stamp = s.touch[gap_end, POSITION], s.touch[gap_end, VALUE], w.facts[STAMP]
    live = s.before[at] - arrays.value[v, SIZE] + w.facts[HELD]
    live -= _mark_last_uses(arrays, s, w, gap_end)
    top, over = 0, 0
    for j in range(w.facts[CHAIN]):
        op = w.chain[j]
        reads, writes, end = arrays.op[op, READS], arrays.op[op, WRITES], arrays.op[op, END]
        used = live + arrays.op[op, WORKSPACE]
        for k in range(writes, end):
            u = arrays.operands[k]
            used += arrays.value[u, SIZE]
            if arrays.value[u, PINNED] == 0 and w.value[u, LAST_USE] > j:
                live += arrays.value[u, SIZE]
        top = max(top, used)
        over += max(0, used - budget)
        for k in range(reads, writes):
            u = arrays.operands[k]
            made = w.op[arrays.value[u, PRODUCER]] == stamp
            held = w.value[u, DECIDED] == stamp and w.value[u, KEPT] == 1
            if (made or held) and w.value[u, LAST_USE] == j and arrays.value[u, PINNED] == 0:
                live -= arrays.value[u, SIZE]
    return top, over


@inner
def _mark_last_uses(arrays: Arrays, s: Sequence, w: Scratch, gap_end: int) -> int:
    """Note where in the chain each value is used last; bytes of second outputs it replaces.

    An op that writes v and w, run again for v while w is alive, makes a new w: the old one is freed
    after its last touch before the chain.
    """
    at, v = s.touch[gap_end, POSITION], s.touch[gap_end, VALUE]
    replaced = 0
    for j in range(w.facts[CHAIN]):
        op = w.chain[j]
        for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
            w.value[arrays.operands[k], LAST_USE] = -1
    for j in range(w.facts[CHAIN]):
        op = w.chain[j]
        for k in range(arrays.op[op, READS], arrays.op[op, WRITES]):
            w.value[arrays.operands[k], LAST_USE] = j
    for j in range(w.facts[CHAIN]):
        op = w.chain[j]
        if arrays.op[op, END] - arrays.op[op, WRITES] < 2:
            continue
        for k in range(arrays.op[op, WRITES], arrays.op[op, END]):
            u = arrays.operands[k]
            if u == v or arrays.value[u, PINNED]:
                continue
            t = s.last[u]
            while s.touch[t, POSITION] >= at:
                t = s.touch[t, PREVIOUS]
            following = s.touch[t, NEXT]
            if following >= 0 and s.touch[following, WRITE] == 0:
                w.value[u, LAST_USE] = _STAYS
                replaced += arrays.value[u, SIZE]
                add_range(w.ranges, s.touch[t, POSITION] + 1, at - 1, -arrays.value[u, SIZE])
    w.value[v, LAST_USE] = _STAYS
    return replaced


@inner
def evict(arrays: Arrays, s: Sequence, w: Scratch, gap_end: int) -> bool:
    """Insert the chain that was just built; False if the sequence would grow out of its room."""
    at, n, more = s.touch[gap_end, POSITION], s.facts[LENGTH], w.facts[CHAIN]
    touches = s.place[n, TOUCHES]
    for j in range(more):
        touches += arrays.op[w.chain[j], END] - arrays.op[w.chain[j], READS]
    if n + more > len(s.ops) or touches > len(s.touch):
        return False
    for p in range(n - 1, at - 1, -1):
        s.ops[p + more] = s.ops[p]
    for j in range(more):
        s.ops[at + j] = w.chain[j]
    s.facts[LENGTH] = n + more
    analyse(arrays, s)
    return True


@inner
def is_required(arrays: Arrays, s: Sequence, position: int) -> bool:
    """Whether the recomputation at ``position`` makes what may not have been kept for it."""
    for k in range(s.place[position, TOUCHES], s.place[position + 1, TOUCHES]):
        v, following = s.touch[k, VALUE], s.touch[k, NEXT]
        read_later = following >= 0 and s.touch[following, WRITE] == 0
        if s.touch[k, WRITE] and read_later and _is_dropped(arrays, s, v, s.touch[k, PREVIOUS]):
            return True
    return False


@inner
def build_retain(arrays: Arrays, s: Sequence, w: Scratch, position: int) -> float:
    """Seconds saved by taking out the recomputation at ``position``; IMPOSSIBLE for a first run.

    Leaves what that changes in ``w.ranges``.
    """
    if s.place[position, AGAIN] == 0 or is_required(arrays, s, position):
        return IMPOSSIBLE
    w.facts[STAMP] += 1
    w.ranges.size[0] = 0
    w.place[position] = w.facts[STAMP]
    stamp, saved, depth = w.facts[STAMP], 0.0, 1
    w.stack[0] = position
    for k in range(s.place[position, TOUCHES], s.place[position + 1, TOUCHES]):
        v, following = s.touch[k, VALUE], s.touch[k, NEXT]
        read_later = following >= 0 and s.touch[following, WRITE] == 0
        if s.touch[k, WRITE] and read_later and arrays.value[v, PINNED] == 0:
            first = s.touch[s.touch[k, PREVIOUS], POSITION] + 1
            if not add_range(w.ranges, first, position - 1, arrays.value[v, SIZE]):
                return IMPOSSIBLE
    while depth > 0:
        depth -= 1
        p = w.stack[depth]
        saved += arrays.seconds[s.ops[p]]
        for k in range(s.place[p, TOUCHES], s.place[p + 1, TOUCHES]):
            v, following = s.touch[k, VALUE], s.touch[k, NEXT]
            ends = following < 0 or s.touch[following, WRITE] == 1
            if s.touch[k, WRITE] or not ends or arrays.value[v, PINNED]:
                continue
            previous = s.touch[k, PREVIOUS]
            q = s.touch[previous, POSITION]
            if not add_range(w.ranges, q + 1, p - 1, -arrays.value[v, SIZE]):
                return IMPOSSIBLE
            if s.touch[previous, WRITE] and w.place[q] != stamp and _only_serves(s, w, q):
                w.place[q] = stamp
                w.stack[depth] = q
                depth += 1
    return saved


@inner
def _only_serves(s: Sequence, w: Scratch, position: int) -> bool:
    """Whether the recomputation at ``position`` is read only by recomputations being taken out."""
    if s.place[position, AGAIN] == 0 or position < s.facts[BOUNDARY]:
        return False
    for k in range(s.place[position, TOUCHES], s.place[position + 1, TOUCHES]):
        if s.touch[k, WRITE] == 0:
            continue
        t = s.touch[k, NEXT]
        while t >= 0 and s.touch[t, WRITE] == 0:
            if w.place[s.touch[t, POSITION]] != w.facts[STAMP]:
                return False
            t = s.touch[t, NEXT]
    return True


@inner
def retain(arrays: Arrays, s: Sequence, position: int) -> None:
    """Take out the recomputation at ``position``."""
    n = s.facts[LENGTH]
    for p in range(position, n - 1):
        s.ops[p] = s.ops[p + 1]
    s.facts[LENGTH] = n - 1
    analyse(arrays, s)
