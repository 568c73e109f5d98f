"""What changing one decision would do, the rest of the schedule left as it is.

The changed schedule is judged by the simulator, so its peak and seconds are exact; a solver that
was allowed to change more at once could do better. Three changes are known:

- *kept → recomputed*: the value is dropped when forward has ended, and made again just before
  backward first reads it, together with those of its inputs that are not there;
- *recomputed → kept*: its op no longer runs again, and neither does what ran again for it alone;
- *offloaded → kept*: its transfers are left out.

The page does the same in ``page/judge.js``, for whichever value is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.solvers.errors import InvalidSchedule
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Decision, Schedule, Step, Timeline, with_frees
from remat.solvers.simulate import simulate

RUNS_ONCE = "its op may run only once"
NOT_KEEPABLE = "it may not be kept"
OUTPUT = "forward returns it, so it is there to the end whatever is decided"


@dataclass(frozen=True, slots=True)
class Change:
    """The other decision about one value.

    Attributes:
        decision: what it would be.
        timeline: the judge's account of the changed schedule; None where there is none.
        refused: why there is none, as a clause.
    """

    decision: Decision
    timeline: Timeline | None
    refused: str = ""


def change(
    problem: Problem,
    schedule: Schedule,
    value: int,
    decision: Decision,
    link: Link | None = None,
) -> Change:
    """Change the decision about ``value``, which is ``decision`` now."""
    other = Decision.RECOMPUTE if decision is Decision.KEEP else Decision.KEEP
    producer = problem.ops[problem.producer[value]]
    if problem.values[value].output == "forward":
        return Change(other, None, OUTPUT)
    if other is Decision.RECOMPUTE and not producer.rerunnable:
        return Change(other, None, RUNS_ONCE)
    if other is Decision.KEEP and not all(problem.values[v].keepable for v in producer.writes):
        return Change(other, None, NOT_KEEPABLE)
    if decision is Decision.KEEP:
        changed = _recomputed(problem, schedule, value)
    elif decision is Decision.RECOMPUTE:
        changed = _kept(problem, schedule, value)
    else:
        events = (s for s in schedule.steps if s.kind == "compute" or s.index != value)
        changed = with_frees(problem, [step for step in events if step.kind != "free"])
    try:
        return Change(other, simulate(problem, changed, link))
    except InvalidSchedule as error:  # a transfer is in the way
        return Change(other, None, f"the rest of the schedule does not allow it ({error})")


def _recomputed(problem: Problem, schedule: Schedule, value: int) -> Schedule:
    boundary = schedule.boundary(problem)
    alive: set[int] = set(problem.tangents)
    events: list[Step] = []
    done = False
    for position, step in enumerate(schedule.steps):
        if step.kind == "free":
            alive.discard(step.index)
            continue
        if step.kind == "compute":
            op = problem.ops[step.index]
            if not done and position >= boundary and value in op.reads:
                events += [Step("compute", again) for again in _again(problem, value, alive)]
                done = True
            alive.update(op.writes)
        elif step.kind == "reload":
            alive.add(step.index)
        events.append(step)
    return with_frees(problem, events)


def _again(problem: Problem, value: int, alive: set[int]) -> list[int]:
    """The ops that make ``value`` anew from what is alive, in program order.

    An input whose op runs only once is not made again: reading it holds it until then.
    """
    needed = {problem.producer[value]}
    left = list(needed)
    while left:
        for read in problem.ops[left.pop()].reads:
            producer = problem.producer[read]
            if read in alive or producer < 0 or producer in needed:
                continue
            if problem.ops[producer].rerunnable:
                needed.add(producer)
                left.append(producer)
    return sorted(needed)


def _kept(problem: Problem, schedule: Schedule, value: int) -> Schedule:
    producer = problem.producer[value]
    seen: set[int] = set()
    events: list[tuple[Step, bool]] = []  # with whether it is a first run or a transfer
    for step in schedule.steps:
        if step.kind == "free":
            continue
        first = step.kind != "compute" or step.index not in seen
        if step.kind == "compute":
            seen.add(step.index)
            if not first and step.index == producer:
                continue
        events.append((step, first))
    return with_frees(problem, _without_idle_runs(problem, events))


def _without_idle_runs(problem: Problem, events: Sequence[tuple[Step, bool]]) -> list[Step]:
    """Leave out the runs beyond the first that nobody reads the outcome of."""
    read_later: set[int] = set()
    left: list[Step] = []
    for step, stays in reversed(events):
        reads, writes = _touches(problem, step)
        if not stays and read_later.isdisjoint(writes):
            continue
        read_later.difference_update(writes)
        read_later.update(reads)
        left.append(step)
    return left[::-1]


def _touches(problem: Problem, step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values a step reads, and those it makes."""
    if step.kind == "compute":
        op = problem.ops[step.index]
        return op.reads, op.writes
    return ((), (step.index,)) if step.kind == "reload" else ((step.index,), ())
