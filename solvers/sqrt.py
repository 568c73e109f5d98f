"""``sqrt``: cut forward into segments, save what crosses the cuts, recompute a segment at a time.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016),
section 4, by bytes instead of by count, as its algorithm 3 does.

For a threshold b: walk forward, sum the bytes that backward will need, and close a segment as
soon as they reach b, at the position of its last stretch (from 0.4 b on) where the fewest bytes
cross. What crosses a cut is saved; so is everything in the last segment, which backward enters
at once. Any other value is recomputed when first needed and kept to its last read. With n equal
layers and b = total / sqrt(n), O(sqrt(n)) bytes are alive and every op runs at most twice.

The sweep takes total / b in 1 (save all), 2, 3, ... and answers the fastest plan that fits, or
the one with the least peak if none does. One level only: ``chain`` nests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.segments import Candidate, Crossings, Demands, replay

SEGMENTS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
_EARLIEST_CUT: Final = 0.4  # of the threshold: earlier cuts are cheap but leave segments too short


@register("sqrt")
def solve_sqrt(request: Request) -> Proposal:
    """The best plan of the sweep."""
    problem = request.problem
    demands, crossings = Demands.of(problem), Crossings.of(problem)
    needed = [0] * len(problem.forward)
    for v, position in enumerate(crossings.made):
        if position >= 0 and demands.last[v] >= 0:
            needed[position] += problem.values[v].bytes
    seen: set[tuple[int, ...]] = set()
    best: Candidate | None = None
    for count in SEGMENTS:
        threshold = sum(needed) / count if count > 1 else math.inf
        cuts = cut_positions(needed, crossings.bytes, threshold)
        if cuts in seen:
            continue
        seen.add(cuts)
        computes = replay(problem, _held_from(problem, demands, crossings, cuts))
        candidate = Candidate.of(problem, computes)
        budget = request.memory_budget
        if best is None or candidate.rank(budget) < best.rank(budget):
            best = candidate
        if request.max_evaluations is None and request.seconds_left == 0.0:
            break
    return Proposal(best.schedule if best else None)


def cut_positions(
    needed: Sequence[int], crossing: Sequence[int], threshold: float
) -> tuple[int, ...]:
    """Forward positions to cut after, in order.

    Args:
        needed: for each forward position, the bytes made there that backward needs.
        crossing: for each forward position, the bytes alive from there to the next.
        threshold: bytes a segment should hold.
    """
    cuts: list[int] = []
    held, stretch = 0, []
    for position, made in enumerate(needed[:-1]):
        held += made
        if held >= _EARLIEST_CUT * threshold:
            stretch.append(position)
        if held >= threshold > 0:
            cuts.append(min(stretch, key=lambda t: (crossing[t], -t)))
            held, stretch = sum(needed[cuts[-1] + 1 : position + 1]), []
    return tuple(cuts)


def _held_from(
    problem: Problem, demands: Demands, crossings: Crossings, cuts: tuple[int, ...]
) -> list[int]:
    segment = [bisect_left(cuts, made) for made in crossings.made]
    begins = [len(problem.backward)] * (len(cuts) + 1)
    for v, made in enumerate(crossings.made):
        if made >= 0:
            begins[segment[v]] = min(begins[segment[v]], demands.first[v])
    held_from = [0] * len(problem.values)
    for v, made in enumerate(crossings.made):
        if made >= 0 and segment[v] < len(cuts):
            held_from[v] = begins[segment[v]] + 1
    for cut in cuts:
        for v in crossings.at(cut):
            held_from[v] = 0
    return held_from
