"""What a solver answers: a schedule (every step, in order) and what is known about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from remat.solvers.problem import Problem, Value

StepKind = Literal["compute", "free", "offload", "reload", "wait"]
Status = Literal["optimal", "feasible", "infeasible", "not found"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: ``compute`` the op ``index``, or free / offload / reload / wait for the value."""

    kind: StepKind
    index: int


class Decision(Enum):
    """What happens to a forward value that backward needs."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The whole truth about what will run and in what order, any number of recomputations.

    The part that runs in forward ends right after the last first run of a forward op (and the frees
    that follow it); everything after that is the backward part.
    """

    steps: tuple[Step, ...]

    @property
    def computes(self) -> tuple[int, ...]:
        """The ops that run, in order."""
        return tuple(step.index for step in self.steps if step.kind == "compute")

    def boundary(self, problem: Problem) -> int:
        """Index of the first step of the backward part."""
        left = len(problem.forward)
        for position, step in enumerate(self.steps):
            if left == 0 and step.kind != "free":
                return position
            if step.kind == "compute" and problem.ops[step.index].phase == "forward":
                left -= 1
        return len(self.steps)

    @staticmethod
    def from_computes(problem: Problem, computes: Sequence[int]) -> Schedule:
        """The schedule that runs ``computes`` and frees every instance after its last read.

        A value nobody reads is freed at once. Outputs, owned values and unread tangents stay.
        """
        return with_frees(problem, [Step("compute", index) for index in computes])


def with_frees(problem: Problem, steps: Iterable[Step]) -> Schedule:
    """Compute, offload, reload and wait steps, with every instance freed after its last use.

    A copy that leaves uses the value until it is waited for; a reload makes a new instance, as
    computing does. Outputs, owned values and unread tangents stay. Frees among ``steps`` are left
    out.
    """
    order = [step for step in steps if step.kind != "free"]
    last = _last_uses(problem, order)
    alive = set(problem.tangents)
    found: list[Step] = []
    for step, ends in zip(order, last, strict=True):
        found.append(step)
        alive.update(_made(problem, step))
        for value in ends:
            if value in alive:
                found.append(Step("free", value))
                alive.discard(value)
    return Schedule(tuple(found))


def _last_uses(problem: Problem, steps: Sequence[Step]) -> list[list[int]]:
    """For each step, the values whose instance is not used after it before it is made anew."""
    used_later: set[int] = set()
    last: list[list[int]] = []
    for step in reversed(steps):
        made, used = _made(problem, step), _used(problem, step)
        ends = [v for v in dict.fromkeys((*used, *made)) if v not in used_later]
        last.append([v for v in ends if not _stays(problem.values[v])])
        used_later.difference_update(made)
        used_later.update(used)
    return last[::-1]


def _stays(value: Value) -> bool:
    return value.owned or value.output is not None


def _made(problem: Problem, step: Step) -> tuple[int, ...]:
    if step.kind == "compute":
        return problem.ops[step.index].writes
    return (step.index,) if step.kind == "reload" else ()


def _used(problem: Problem, step: Step) -> tuple[int, ...]:
    if step.kind == "compute":
        return problem.ops[step.index].reads
    return () if step.kind == "reload" else (step.index,)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the simulator saw.

    Attributes:
        bytes: for each step, the bytes in use while it runs (fixed bytes and workspace included).
        peak: the largest of them, and at least ``fixed_bytes``.
        peak_step: index of the first step that reaches it; -1 for a schedule without steps.
        alive_at_peak: the values alive there, written ones included.
        seconds: the whole step, stalls of transfers included.
        flops: floating point operations of everything that ran.
        forward_seconds, forward_flops: the part up to the boundary.
        forward_peak, backward_peak: the largest bytes on either side of the boundary.
    """

    bytes: tuple[int, ...]
    peak: int
    peak_step: int
    alive_at_peak: tuple[int, ...]
    seconds: float
    flops: int
    forward_seconds: float
    forward_flops: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what is known about it.

    Attributes:
        problem_key: ``Problem.key`` of the problem it solves.
        schedule, timeline: the plan, and the judge's account of it. For ``infeasible`` and
            ``not found``, the plan with the least peak that was found.
        memory_budget: bytes asked for, or None.
        status: ``optimal`` (no schedule of the class is faster within the budget), ``feasible``,
            ``infeasible`` (proven: the budget is under ``peak_lower_bound``), ``not found``.
        lower_bound: seconds that no schedule of the class within the budget can beat.
        peak_lower_bound: bytes that no schedule of the class can peak below; the op that sets it is
            ``floor_op``, or -1 where no single op does (fixed bytes, or cuts without room).
        solver: the algorithm that found the plan.
        solve_time: seconds spent solving.
        failures: what went wrong on the way, for people (a solver that crashed or timed out).
    """

    problem_key: str
    schedule: Schedule
    timeline: Timeline
    memory_budget: int | None
    status: Status
    lower_bound: float
    peak_lower_bound: int
    floor_op: int
    solver: str
    solve_time: float = 0.0
    failures: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the step under this plan."""
        return self.timeline.seconds

    @property
    def peak(self) -> int:
        """Peak bytes of the step under this plan."""
        return self.timeline.peak

    @property
    def fits(self) -> bool:
        """Whether the plan keeps the budget."""
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        """(seconds - lower bound) / seconds: how much faster a better plan could at most be."""
        if self.seconds <= 0:
            return 0.0
        return max(0.0, (self.seconds - self.lower_bound) / self.seconds)


def decisions(problem: Problem, schedule: Schedule) -> dict[int, Decision]:
    """For every forward value the backward part reads: kept, recomputed or offloaded.

    A value counts as recomputed if backward reads an instance that was made in backward. An op that
    is run again for one of its outputs makes the others, too; nobody reads those.
    """
    boundary = schedule.boundary(problem)
    made_in_forward: set[int] = set()
    alive: set[int] = set()
    fresh: set[int] = set()
    read: set[int] = set()
    recomputed: set[int] = set()
    for position, step in enumerate(schedule.steps):
        if step.kind == "free":
            alive.discard(step.index)
            fresh.discard(step.index)
        elif step.kind == "compute":
            op = problem.ops[step.index]
            made = set(op.writes) - alive  # a second instance is dropped when the op returns
            alive |= made
            if position < boundary:
                made_in_forward |= made
                continue
            read.update(op.reads)
            recomputed |= fresh.intersection(op.reads)
            fresh |= made
    offloaded = {step.index for step in schedule.steps if step.kind == "offload"}
    return {
        value: _decide(value, recomputed, offloaded) for value in sorted(made_in_forward & read)
    }


def _decide(value: int, recomputed: set[int], offloaded: set[int]) -> Decision:
    if value in offloaded:
        return Decision.OFFLOAD
    return Decision.RECOMPUTE if value in recomputed else Decision.KEEP
