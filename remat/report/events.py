"""What a plan does to memory, one allocation and one release at a time.

The simulator says how many bytes are in use at every step; viewers want to know which ones. The
levels here are the simulator's: during every op, the bytes allocated and not yet released are
``Timeline.bytes`` of its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from remat.solvers.problem import Link, Op, Problem
from remat.solvers.schedule import Schedule, Timeline

What = Literal["resident", "value", "copy", "workspace"]

RESIDENT: Final = "parameters, inputs and other resident bytes"


@dataclass(frozen=True)
class Scheduled:
    """A schedule and what it belongs to: a plan of one graph, or of a whole step.

    Attributes:
        title: for people.
        problem, schedule, timeline: the plan.
        baseline, baseline_timeline: what the executor does unasked.
        memory_budget: bytes, or None.
        code_peak: the peak of the code inductor generated, in bytes, where there is such code: the
            schedule is the estimate it was compiled by.
        link: where offloaded values go.
    """

    title: str
    problem: Problem
    schedule: Schedule
    timeline: Timeline
    baseline: Schedule
    baseline_timeline: Timeline
    memory_budget: int | None = None
    code_peak: int | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One allocation or release.

    Attributes:
        step: index of the schedule's step it belongs to; -1 for what is there at the start.
        block: tells allocations apart; a release has that of its allocation.
        what: what the bytes hold: ``resident`` bytes, a ``value``, a second ``copy`` of a value
            that is alive, or the ``workspace`` of an op.
        name: of the value or op.
        value: index of the value, or -1.
        bytes: more (allocated) or fewer (released) in use.
        maker: index of the op that made it; -1 for what comes from outside.
    """

    step: int
    block: int
    what: What
    name: str
    value: int
    bytes: int
    maker: int


def changes(problem: Problem, schedule: Schedule, timeline: Timeline) -> tuple[Change, ...]:
    """Every allocation and release of a schedule, in order; empty storages are left out.

    An input that an op writes over is released right before the result is allocated.

    Args:
        timeline: the simulator's account of it.
    """
    watch = _Watch(problem, timeline)
    boundary = schedule.boundary(problem)
    for position, step in enumerate(schedule.steps):
        if position == boundary:
            watch.enter_backward(position)
        watch.run(position, step.kind, step.index)
    if boundary == len(schedule.steps):
        watch.enter_backward(boundary)
    return tuple(watch.seen)


@dataclass
class _Watch:
    problem: Problem
    timeline: Timeline
    seen: list[Change] = field(default_factory=list)
    level: int = 0
    blocks: int = 0
    held: dict[int, Change] = field(default_factory=dict)  # value → its allocation
    overwritten: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._allocate(-1, "resident", RESIDENT, -1, self.problem.fixed_bytes, -1)

    def enter_backward(self, position: int) -> None:
        for value in self.problem.tangents:
            if value not in self.held:
                self._hold(position, value, self.problem.values[value].bytes)

    def run(self, position: int, kind: str, index: int) -> None:
        if kind == "compute":
            self._compute(position, index)
        elif kind == "free":
            self._free(position, index)
        elif kind == "reload":
            self._hold(position, index, self.problem.values[index].bytes)

    def _compute(self, position: int, index: int) -> None:
        op = self.problem.ops[index]
        fresh = [value for value in op.writes if value not in self.held]
        added = sum(self.problem.values[value].bytes for value in fresh)
        second = sum(self.problem.values[v].bytes for v in op.writes) - added
        excess = self.level + added + second - self.timeline.bytes[position]
        if op.workspace < 0 and excess > 0:
            excess -= self._write_over(position, op, excess)
        for value in fresh:
            size = self.problem.values[value].bytes
            # What an op writes over is not always one whole input: the result is drawn smaller, and
            # what is missing later stands among the workspace.
            late = min(size, max(0, excess))
            excess -= late
            self._hold(position, value, size - late)
        copies = [
            self._allocate(position, "copy", self.problem.values[v].name, v,
                           self.problem.values[v].bytes, index)
            for v in op.writes if v not in fresh
        ]  # fmt: skip
        room = self.timeline.bytes[position] - self.level
        copies.append(self._allocate(position, "workspace", op.name, -1, max(0, room), index))
        for copy in reversed(copies):
            self._release(position, copy)

    def _write_over(self, position: int, op: Op, excess: int) -> int:
        """Release inputs that the op writes over, ``excess`` bytes at most; answers how many."""
        released = 0
        reads = sorted(op.reads, key=lambda value: -self.problem.values[value].bytes)
        for value in reads:
            held = self.held.get(value)
            keeps = self.problem.values[value].output or value in self.overwritten
            if held is None or keeps or not 0 < held.bytes <= excess - released:
                continue
            self.overwritten.add(value)
            self._release(position, held)
            released += held.bytes
        return released

    def _free(self, position: int, value: int) -> None:
        held = self.held.pop(value, None)
        if value in self.overwritten:
            self.overwritten.discard(value)
        elif held is not None:
            self._release(position, held)

    def _hold(self, position: int, value: int, size: int) -> None:
        maker = self.problem.producer[value]
        name = self.problem.values[value].name
        self.held[value] = self._allocate(position, "value", name, value, size, maker)

    def _allocate(
        self, position: int, what: What, name: str, value: int, size: int, maker: int
    ) -> Change:
        change = Change(position, self.blocks, what, name, value, size, maker)
        self.blocks += 1
        self.level += size
        if size:
            self.seen.append(change)
        return change

    def _release(self, position: int, held: Change) -> None:
        self.level -= held.bytes
        if held.bytes:
            self.seen.append(
                Change(
                    position, held.block, held.what, held.name, held.value, -held.bytes, held.maker
                )
            )


@dataclass(frozen=True, slots=True)
class Slice:
    """A step of a schedule in time, in seconds since the begin.

    Attributes:
        step: index of the schedule's step.
        kind: ``compute``, ``offload`` or ``reload``.
        index: of the op or the value.
        begin, end: seconds.
        again: whether the op had run before.
        backward: whether it runs in the backward part.
    """

    step: int
    kind: Literal["compute", "offload", "reload"]
    index: int
    begin: float
    end: float
    again: bool
    backward: bool


def slices(problem: Problem, schedule: Schedule, link: Link | None = None) -> Iterator[Slice]:
    """When each op and each transfer runs, by the simulator's clock: ops one after the other, one
    queue for each way of the link.
    """
    boundary = schedule.boundary(problem)
    now, queues, done, ran = 0.0, {"offload": 0.0, "reload": 0.0}, dict[int, float](), set[int]()
    for position, step in enumerate(schedule.steps):
        backward = position >= boundary
        if step.kind == "compute":
            begin, now = now, now + problem.ops[step.index].seconds
            again = step.index in ran
            yield Slice(position, "compute", step.index, begin, now, again, backward)
            ran.add(step.index)
        elif step.kind == "wait":
            now = max(now, done.pop(step.index, now))
        elif step.kind in ("offload", "reload") and link is not None:
            kind: Literal["offload", "reload"] = step.kind
            rate = link.offload_bandwidth if kind == "offload" else link.reload_bandwidth
            begin = max(now, queues[kind])
            end = begin + link.latency + problem.values[step.index].bytes / rate
            queues[kind] = done[step.index] = end
            yield Slice(position, kind, step.index, begin, end, False, backward)
