"""Exhaustive optima over the class of schedules, for problems of about eight ops.

The class: every forward op once, in program order; a deferred op first where a backward op
demands it (or, if it only makes an output, after the last backward op); recomputation only after
forward has ended; backward ops once, in order. Tangents nobody reads stay to the end.

Dijkstra's algorithm over the states (forward ops done, backward ops done, deferred ops that have
run, values alive), sets as bit masks; the length of a path is its seconds, or its peak.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule

State = tuple[int, int, int, int]  # forward done, backward done, deferred ran, alive


def least_seconds(problem: Problem, memory_budget: int | None) -> tuple[float, Schedule] | None:
    """The fastest schedule whose peak is within ``memory_budget`` bytes; None if there is none."""
    if memory_budget is not None and memory_budget < problem.fixed_bytes:
        return None
    return _shortest(problem, memory_budget, 0.0, lambda length, seconds, used: length + seconds)


def least_peak(problem: Problem) -> tuple[int, Schedule]:
    """The schedule with the smallest peak, in bytes."""
    found = _shortest(
        problem, None, float(problem.fixed_bytes), lambda length, seconds, used: max(length, used)
    )
    assert found is not None, "save-all is always a schedule"
    return int(found[0]), found[1]


def _shortest(
    problem: Problem,
    memory_budget: int | None,
    start_length: float,
    extend: Callable[[float, float, int], float],
) -> tuple[float, Schedule] | None:
    moves = _Moves(problem)
    start = moves.start()
    queue: list[tuple[float, int, State]] = [(start_length, 0, start)]
    best: dict[State, float] = {start: start_length}
    came_from: dict[State, tuple[State, int]] = {}
    pushed = 0
    while queue:
        length, _, state = heapq.heappop(queue)
        if length > best[state]:
            continue
        if moves.is_end(state):
            return length, Schedule.from_computes(problem, _path(came_from, state))
        for op, used, following in moves.following(state):
            if op >= 0 and memory_budget is not None and used > memory_budget:
                continue
            seconds = problem.ops[op].seconds if op >= 0 else 0.0
            longer = extend(length, seconds, used) if op >= 0 else length
            if longer < best.get(following, float("inf")):
                best[following] = longer
                came_from[following] = (state, op)
                pushed += 1
                heapq.heappush(queue, (longer, pushed, following))
    return None


def _path(came_from: dict[State, tuple[State, int]], state: State) -> list[int]:
    computes: list[int] = []
    while state in came_from:
        state, op = came_from[state]
        if op >= 0:
            computes.append(op)
    return computes[::-1]


def _mask(indices: Iterable[int]) -> int:
    return sum(1 << i for i in indices)


@dataclass
class _Moves:
    """Which states follow a state: one op runs, or (op -1) one value is dropped."""

    problem: Problem

    def __post_init__(self) -> None:
        problem = self.problem
        values = problem.values
        self.reads = [_mask(v for v in op.reads if not values[v].owned) for op in problem.ops]
        self.writes = [_mask(op.writes) for op in problem.ops]
        self.tangents = _mask(problem.tangents)
        self.dropped = _mask(problem.dropped)
        self.outputs = _mask(i for i, v in enumerate(values) if v.output and not v.owned)
        self.demanded_at = demanded_at(problem)
        # Values that only backward makes or reads die after their last read, without a choice;
        # keeping a value of no bytes costs nothing. Both leave fewer states.
        once = [v for b in problem.backward for v in problem.ops[b].writes] + [*problem.tangents]
        weightless = [i for i, v in enumerate(values) if v.bytes == 0]
        self.droppable = ~(self.outputs | _mask(once) | _mask(weightless))
        self.dead_after = [0] * len(problem.backward)
        for v in once:
            touched = [
                position
                for position, b in enumerate(problem.backward)
                if v in problem.ops[b].reads or v in problem.ops[b].writes
            ]
            if touched and not values[v].output:
                self.dead_after[touched[-1]] |= 1 << v

    def start(self) -> State:
        return (0, 0, 0, 0 if self.problem.forward else self.tangents)

    def is_end(self, state: State) -> bool:
        done = state[0] == len(self.problem.forward) and state[1] == len(self.problem.backward)
        return done and state[3] & self.outputs == self.outputs

    def bytes(self, alive: int) -> int:
        return sum(v.bytes for i, v in enumerate(self.problem.values) if alive >> i & 1)

    def following(self, state: State) -> Iterator[tuple[int, int, State]]:
        done, backward, ran, alive = state
        problem = self.problem
        live = self.problem.fixed_bytes + self.bytes(state[3])
        for v in range(len(problem.values)):
            if alive & self.droppable & 1 << v:
                yield -1, 0, (done, backward, ran, alive & ~(1 << v))
        for index, op in enumerate(problem.ops):
            if self.reads[index] & ~alive or not self._may_run(index, state):
                continue
            used = live + self.bytes(self.writes[index]) + op.workspace
            after = alive | self.writes[index]
            if op.phase == "backward":
                yield index, used, (done, backward + 1, ran, after & ~self.dead_after[backward])
            elif op.phase == "deferred":
                yield index, used, (done, backward, ran | 1 << index, after)
            elif done == len(problem.forward):
                yield index, used, (done, backward, ran, after)
            else:
                if done + 1 == len(problem.forward):
                    after = (after | self.tangents) & ~self.dropped
                yield index, used, (done + 1, backward, ran, after)

    def _may_run(self, index: int, state: State) -> bool:
        done, backward, ran, alive = state
        problem, op = self.problem, self.problem.ops[index]
        forward_ended = done == len(problem.forward)
        if not forward_ended:
            return op.phase == "forward" and problem.forward[done] == index
        if op.phase == "backward":
            return backward < len(problem.backward) and problem.backward[backward] == index
        if op.phase == "deferred" and not ran >> index & 1:
            return backward >= self.demanded_at[index]
        return op.rerunnable and bool(self.writes[index] & ~alive)


def demanded_at(problem: Problem) -> dict[int, int]:
    """For each deferred op, how many backward ops are done when it is first demanded.

    ``len(problem.backward)`` if it only makes an output, more than that if nobody demands it.
    """
    never = len(problem.backward) + 1
    demanded = dict.fromkeys(problem.deferred, never)
    for index in reversed(problem.deferred):
        if any(problem.values[v].output for v in problem.ops[index].writes):
            demanded[index] = len(problem.backward)
        for position, b in enumerate(problem.backward):
            if set(problem.ops[b].reads) & set(problem.ops[index].writes):
                demanded[index] = min(demanded[index], position)
        for other in problem.deferred:
            if set(problem.ops[other].reads) & set(problem.ops[index].writes):
                demanded[index] = min(demanded[index], demanded[other])
    return demanded
