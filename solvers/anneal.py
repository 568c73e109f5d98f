"""Repair, fill and annealing on sequences: the compiled part of the search.

*Repair* evicts, at the peak, the value that costs least added time per byte of excess taken away,
until the budget is kept. *Fill* takes recomputations out while the budget allows it. One *round* of
annealing takes out a random recomputation or two (or evicts at random), repairs, fills, and accepts
the result if it is faster, or a little slower while the temperature allows.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solvers.compiled import compiled, inner
from remat.solvers.evaluate import (
    AGAIN,
    BOUNDARY,
    LENGTH,
    PEAK,
    PEAK_POSITION,
    PINNED,
    POSITION,
    PREVIOUS,
    PRODUCER,
    RERUNNABLE,
    SIZE,
    VALUE,
    WRITE,
    Arrays,
    Floats,
    Ints,
    Sequence,
    copy_front,
    excess,
    judge_ranges,
    load,
)
from remat.solvers.moves import (
    CHAIN,
    EVALUATIONS,
    FIT,
    HOLD,
    MAKE,
    Scratch,
    build_chain,
    build_retain,
    evict,
    is_required,
    judge_evict,
    retain,
)

NOW, BEST = range(2)  # rows of Memory.ops
_KICKS: Final = 6
_STALE: Final = 400  # rounds without a better plan after which the search returns to the best one


class Memory(NamedTuple):
    """What a search remembers between rounds.

    Attributes:
        ops, length, seconds: the sequence the search stands at (NOW), and the fastest found (BEST).
        random: state of the generator. counts: rounds since the last better plan; scratch.
        candidates: scratch.
    """

    ops: Ints
    length: Ints
    seconds: Floats
    random: npt.NDArray[np.uint64]
    counts: Ints
    candidates: Ints


def new_memory(arrays: Arrays, s: Sequence, seed: int) -> Memory:
    """An empty memory for a search in ``s``; ``seed`` is any int."""
    capacity = len(s.ops)
    state = np.random.SeedSequence(abs(seed)).generate_state(1, np.uint64) | np.uint64(1)
    return Memory(
        ops=np.zeros((2, capacity), dtype=np.int64),
        length=np.zeros(2, dtype=np.int64),
        seconds=np.full(2, np.inf),
        random=state,
        counts=np.zeros(2, dtype=np.int64),
        candidates=np.zeros(max(len(arrays.value), capacity) + 1, dtype=np.int64),
    )


@compiled
def draw(random: npt.NDArray[np.uint64]) -> float:
    """Uniform in [0, 1): Marsaglia's xorshift."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return float(x >> np.uint64(11)) / 9007199254740992.0


@inner
def pick(random: npt.NDArray[np.uint64], count: int) -> int:
    """Uniform in 0 .. count - 1."""
    return min(count - 1, int(draw(random) * count))


@inner
def find_gaps(arrays: Arrays, s: Sequence, memory: Memory, at: int) -> int:
    """Put into ``memory.candidates`` the ends of all gaps over ``at`` that may be evicted."""
    found = 0
    for v in range(len(arrays.value)):
        producer = arrays.value[v, PRODUCER]
        t = s.last[v]
        if t < 0 or producer < 0 or s.touch[t, POSITION] <= at or arrays.value[v, SIZE] == 0:
            continue
        if arrays.op[producer, RERUNNABLE] == 0 or arrays.value[v, PINNED]:
            continue
        following = t
        while t >= 0 and s.touch[t, POSITION] > at:
            following = t
            t = s.touch[t, PREVIOUS]
        if t < 0 or s.touch[t, POSITION] == at or s.touch[following, WRITE]:
            continue
        if s.touch[following, POSITION] >= s.facts[BOUNDARY]:
            memory.candidates[found] = following
            found += 1
    return found


@inner
def thin(arrays: Arrays, s: Sequence, memory: Memory, found: int, most: int) -> int:
    """Leave ``most`` candidates: tournaments of two, the larger value wins."""
    if found <= most:
        return found
    for i in range(most):
        j = i + pick(memory.random, found - i)
        k = i + pick(memory.random, found - i)
        a, b = memory.candidates[j], memory.candidates[k]
        if arrays.value[s.touch[b, VALUE], SIZE] > arrays.value[s.touch[a, VALUE], SIZE]:
            j = k
        memory.candidates[i], memory.candidates[j] = memory.candidates[j], memory.candidates[i]
    return most


@compiled
def repair(
    arrays: Arrays,
    s: Sequence,
    w: Scratch,
    memory: Memory,
    budget: int,
    steps: int,
    width: int,
    most: float,
    noise: float,
) -> bool:
    """Evict until the peak keeps ``budget``; False if it does not within ``steps`` evictions.

    Args:
        width: how many evictions to price at each step.
        most: seconds the sequence may take.
        noise: prices are multiplied by a random number in [1, 1 + noise].
    """
    kicks = 0
    for _ in range(steps):
        if s.facts[PEAK] <= budget:
            return True
        if s.seconds[0] > most:
            return False
        at = s.facts[PEAK_POSITION] if kicks == 0 else _random_excess(s, memory, budget)
        found = thin(arrays, s, memory, find_gaps(arrays, s, memory, at), width)
        gap_end, mode = _cheapest(arrays, s, w, memory, found, budget, most, noise)
        if gap_end < 0:
            kicks += 1
            if kicks > _KICKS:
                return False
            continue
        kicks = 0
        build_chain(arrays, s, w, gap_end, mode, budget, math.inf)
        if not evict(arrays, s, w, gap_end):
            return False
    return bool(s.facts[PEAK] <= budget)


@inner
def _random_excess(s: Sequence, memory: Memory, budget: int) -> int:
    """A random position over the budget."""
    chosen, seen = s.facts[PEAK_POSITION], 0
    for p in range(s.facts[LENGTH]):
        if s.used[p] > budget:
            seen += 1
            if draw(memory.random) * seen < 1.0:
                chosen = p
    return int(chosen)


@inner
def _cheapest(
    arrays: Arrays,
    s: Sequence,
    w: Scratch,
    memory: Memory,
    found: int,
    budget: int,
    most: float,
    noise: float,
) -> tuple[int, int]:
    """(end of the gap, mode) with least added time per byte of excess; (-1, FIT) if none helps."""
    total = excess(s, 0, s.facts[LENGTH] - 1, 0, budget)
    least, chosen, how = math.inf, -1, FIT
    for i in range(found):
        gap_end = memory.candidates[i]
        for mode in (FIT, MAKE, HOLD):
            if mode != FIT and (w.facts[CHAIN] == 0 or draw(memory.random) < 0.7):
                continue
            seconds = build_chain(arrays, s, w, gap_end, mode, budget, most - s.seconds[0])
            if seconds < 0.0:
                continue
            peak, change = judge_evict(arrays, s, w, gap_end, budget)
            if change >= 0:
                continue
            price = seconds / total if peak <= budget else (seconds + 1e-12) / -change
            price *= 1.0 + noise * draw(memory.random)
            if price < least:
                least, chosen, how = price, gap_end, mode
    return chosen, how


@compiled
def fill(arrays: Arrays, s: Sequence, w: Scratch, memory: Memory, budget: int, width: int) -> None:
    """Take recomputations out, the slowest that fits first, until none fits."""
    while True:
        found = _recomputations(arrays, s, memory)
        most, chosen = 0.0, -1
        for i in range(min(found, width)):
            if found > width:
                j = i + pick(memory.random, found - i)
                memory.candidates[i], memory.candidates[j] = (
                    memory.candidates[j],
                    memory.candidates[i],
                )
            saved = build_retain(arrays, s, w, memory.candidates[i])
            if saved > most:
                w.facts[EVALUATIONS] += 1
                peak, _ = judge_ranges(s, w.ranges, budget)
                if peak <= budget:
                    most, chosen = saved, memory.candidates[i]
        if chosen < 0:
            return
        retain(arrays, s, chosen)


@compiled
def sweep(arrays: Arrays, s: Sequence, w: Scratch, budget: int) -> None:
    """Take out every recomputation that fits, slow ones first, later ones first; one look each.

    ``fill`` prices all of them anew for every one it takes out: too slow on long sequences.
    """
    slow = 0.0
    for op in range(len(arrays.seconds)):
        slow += arrays.seconds[op] / len(arrays.seconds)
    for least in (slow, 0.0):
        p = s.facts[LENGTH] - 1
        while p >= s.facts[BOUNDARY]:
            if s.place[p, AGAIN] and arrays.seconds[s.ops[p]] >= least:
                w.facts[EVALUATIONS] += 1
                if build_retain(arrays, s, w, p) >= 0.0:
                    peak, _ = judge_ranges(s, w.ranges, budget)
                    if peak <= budget:
                        retain(arrays, s, p)
            p = min(p, s.facts[LENGTH]) - 1


@inner
def _recomputations(arrays: Arrays, s: Sequence, memory: Memory) -> int:
    found = 0
    for p in range(s.facts[BOUNDARY], s.facts[LENGTH]):
        if s.place[p, AGAIN] and not is_required(arrays, s, p):
            memory.candidates[found] = p
            found += 1
    return found


@compiled
def save(s: Sequence, memory: Memory, row: int) -> None:
    """Remember the sequence as ``row``."""
    n = s.facts[LENGTH]
    copy_front(memory.ops[row], s.ops, n)
    memory.length[row] = n
    memory.seconds[row] = s.seconds[0]


@inner
def _disturb(arrays: Arrays, s: Sequence, w: Scratch, memory: Memory, budget: int) -> bool:
    """Take out a few random recomputations, slow ones rather; False if there are none."""
    found = _recomputations(arrays, s, memory)
    if found == 0:
        return False
    kind = draw(memory.random)
    if kind < 0.2:
        at = pick(memory.random, s.facts[LENGTH])
        gaps = find_gaps(arrays, s, memory, at)
        if gaps > 0:
            gap_end = memory.candidates[pick(memory.random, gaps)]
            mode = pick(memory.random, 3)
            if build_chain(arrays, s, w, gap_end, mode, budget, math.inf) >= 0.0:
                evict(arrays, s, w, gap_end)
    times = 1
    if draw(memory.random) < 0.25:
        times += pick(memory.random, 3)
    for _ in range(times):
        found = _recomputations(arrays, s, memory)
        if found == 0:
            break
        i = memory.candidates[pick(memory.random, found)]
        j = memory.candidates[pick(memory.random, found)]
        slower = arrays.seconds[s.ops[j]] > arrays.seconds[s.ops[i]]
        retain(arrays, s, j if slower else i)
    return True


@compiled
def anneal(
    arrays: Arrays,
    s: Sequence,
    w: Scratch,
    memory: Memory,
    budget: int,
    evaluations: int,
    temperature: float,
) -> int:
    """Rounds from the NOW of ``memory`` until so many more evaluations are spent; the rounds done.

    ``temperature`` in seconds. NOW must keep the budget.
    """
    until = w.facts[EVALUATIONS] + evaluations
    rounds = 0
    while w.facts[EVALUATIONS] < until:
        rounds += 1
        w.facts[EVALUATIONS] += 1
        load(arrays, s, memory.ops[NOW], memory.length[NOW])
        if not _disturb(arrays, s, w, memory, budget):
            return rounds
        width = 60 if draw(memory.random) < 0.33 else 20
        slack = temperature * 0.3 * -math.log(1.0 - draw(memory.random))
        most = memory.seconds[NOW] + temperature
        memory.counts[0] += 1
        if repair(arrays, s, w, memory, budget, 12, width, most, 1.0):
            fill(arrays, s, w, memory, budget, 64)
            if s.seconds[0] <= memory.seconds[NOW] + slack:
                save(s, memory, NOW)
            if s.seconds[0] < memory.seconds[BEST] * (1.0 - 1e-9):
                save(s, memory, BEST)
                memory.counts[0] = 0
        if memory.counts[0] > _STALE:
            memory.counts[0] = 0
            n = memory.length[BEST]
            copy_front(memory.ops[NOW], memory.ops[BEST], n)
            memory.length[NOW] = n
            memory.seconds[NOW] = memory.seconds[BEST]
    return rounds
