"""Schedules that offload, made by hand from schedules that keep."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule, Step, with_frees


def offloadable(problem: Problem, schedule: Schedule) -> list[int]:
    """What the schedule makes in forward, keeps for backward, and could offload instead."""
    computes = schedule.computes
    end = _forward_end(problem, computes)
    made = {v for op in computes[:end] for v in problem.ops[op].writes}
    again = {v for op in computes[end:] for v in problem.ops[op].writes}
    read = {v for op in computes[end:] for v in problem.ops[op].reads}
    return [v for v in sorted((made & read) - again) if problem.values[v].offloadable]


def offload(
    problem: Problem, schedule: Schedule, values: Collection[int], *, window: int = 2
) -> Schedule:
    """The schedule with ``values`` offloaded instead of kept.

    A copy starts when its value is there and is waited for after the last reader in forward; the
    reload starts ``window`` ops before the first reader in backward.
    """
    end = _forward_end(problem, schedule.computes)
    return _with_transfers(
        problem, schedule, {v: _times(problem, schedule.computes, v, end, window) for v in values}
    )


def random_offload(
    problem: Problem, schedule: Schedule, values: Collection[int], rng: random.Random
) -> Schedule:
    """The same at random moments; a copy may also be waited for in backward."""
    computes = schedule.computes
    end = _forward_end(problem, computes)
    times = {}
    for v in values:
        made, last, first = _span(problem, computes, v, end)
        start = rng.randint(made, end)
        ended = rng.randint(max(start, last), rng.choice((end, first)))
        times[v] = (start, ended, rng.randint(max(ended, end), first), first)
    return _with_transfers(problem, schedule, times)


Times = tuple[int, int, int, int]
"""Before which compute step the offload, its wait, the reload and its wait stand."""


def _with_transfers(problem: Problem, schedule: Schedule, times: dict[int, Times]) -> Schedule:
    computes = schedule.computes
    before: list[list[Step]] = [[] for _ in range(len(computes) + 1)]
    for kind in range(4):
        for v, when in times.items():
            name = ("offload", "wait", "reload", "wait")[kind]
            before[when[kind]].append(Step(name, v))  # type: ignore[arg-type]
    steps: list[Step] = []
    for position, op in enumerate(computes):
        steps += [*before[position], Step("compute", op)]
    return with_frees(problem, [*steps, *before[-1]])


def _times(problem: Problem, computes: Sequence[int], v: int, end: int, window: int) -> Times:
    made, last, first = _span(problem, computes, v, end)
    return made, last, max(end, first - window), first


def _span(problem: Problem, computes: Sequence[int], v: int, end: int) -> tuple[int, int, int]:
    """(after it is made, after its last reader in forward, at its first reader in backward)."""
    uses = [i for i, op in enumerate(computes) if v in problem.ops[op].reads]
    made = 1 + next(i for i, op in enumerate(computes) if v in problem.ops[op].writes)
    last = 1 + max((i for i in uses if i < end), default=made - 1)
    return made, last, min(i for i in uses if i >= end)


def _forward_end(problem: Problem, computes: Sequence[int]) -> int:
    left = set(problem.forward)
    for position, op in enumerate(computes):
        if not left:
            return position
        left.discard(op)
    return len(computes)
