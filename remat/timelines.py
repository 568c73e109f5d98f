"""After a run: predicted against measured bytes, op by op. ``remat.measure_timeline``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from remat.backend import plans_of, step_plan_of
from remat.compiled import Compiled
from remat.passes.allocations import Allocations
from remat.passes.observe import Observer, Run
from remat.plans import Plan, Unplanned
from remat.report.timeline import timeline_text
from remat.solvers.errors import InvalidOption, RematError
from remat.solvers.problem import Op
from remat.solvers.schedule import Schedule
from remat.step_plan import StepPlan

EVERY_SEQUENCE_KNOWN: Final = 3
"""Calls after which a step of several graphs runs with its final plan."""


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One run of one op; all sizes in bytes, resident ones included.

    Attributes:
        step: index of the schedule's step.
        op: the op.
        again: it had run before.
        predicted: in use while it runs, as planned.
        measured: in use, at most, from its begin to that of the next op.
    """

    step: int
    op: Op
    again: bool
    predicted: int
    measured: int

    @property
    def deviation(self) -> int:
        """Bytes measured beyond those predicted; below 0 where there were fewer."""
        return self.measured - self.predicted


@dataclass(frozen=True, repr=False)
class MeasuredTimeline:
    """What was predicted for each op of a step, and what was measured.

    Attributes:
        plan: that the step ran with.
        ops: in the order they ran.
        unseen: steps of the plan that run outside the graphs or stand for no kernel of their own
            (accumulating a gradient, say), of which nothing was measured.
        resident: bytes that both figures begin with, as the plan has them.
    """

    plan: Plan | StepPlan
    ops: tuple[MeasuredOp, ...]
    unseen: int
    resident: int

    @property
    def peak_outside(self) -> int | None:
        """The plan's peak, where it is not in a graph but in code outside them, which is not
        watched: :func:`remat.measure` sees it. None where it is in a graph.
        """
        if isinstance(self.plan, Plan) or self.plan.eager_peak < self.plan.peak:
            return None
        return self.plan.peak

    @property
    def predicted_peak(self) -> int:
        """Highest bytes predicted for any op that was seen."""
        return max((op.predicted for op in self.ops), default=self.resident)

    @property
    def measured_peak(self) -> int:
        """Highest bytes measured while any op ran."""
        return max((op.measured for op in self.ops), default=self.resident)

    def largest(self, count: int = 10) -> tuple[MeasuredOp, ...]:
        """The ops whose prediction is farthest off, the farthest first; exact ones left out."""
        off = sorted((op for op in self.ops if op.deviation), key=lambda op: -abs(op.deviation))
        return tuple(off[:count])

    def __str__(self) -> str:
        rows = [(row.op, row.predicted, row.measured) for row in self.ops]
        return timeline_text(rows, self.unseen, self.resident, self.peak_outside)

    def __repr__(self) -> str:
        return (
            f"<MeasuredTimeline {len(self.ops)} ops, peak {self.predicted_peak} bytes predicted, "
            f"{self.measured_peak} measured>"
        )


def measure_timeline(
    step_function: Callable[[], object],
    compiled: Compiled | Mapping[str, Any],
    *,
    warmup: int = EVERY_SEQUENCE_KNOWN,
    device: torch.device | str = "cpu",
) -> MeasuredTimeline:
    """Run a step, and set the bytes measured while each op ran against those its plan predicted.

    Both begin at what the plan has as resident, so the figures differ by what happens in the step.
    A graph that runs several times in the step (accumulation) is watched the last time. An op that
    deviates from its first run on took other bytes than were measured or assumed for it; a
    deviation that begins between forward and backward is code outside the graph, a loss say.

    Args:
        step_function: one training step, without arguments; it is called ``warmup + 1`` times.
        compiled: what ``remat.compile`` returned, or the ``options`` object given to
            ``torch.compile(backend="remat")``.
        warmup: calls before the one that is watched. From the third on, a step of several graphs
            runs with its own plan.
        device: whose memory is measured.

    Raises:
        InvalidOption: ``warmup`` is negative, or ``compiled`` is neither of these.
        RematError: a profiler runs, no planned graph ran, the graphs that ran are not those of the
            plan, or inductor runs them.
    """
    observer = _watch(step_function, warmup, device)
    plan = _plan_of(compiled)
    if isinstance(plan, Plan):
        (runs, predicted), resident = _of_graph(plan, observer.runs), plan.problem.fixed_bytes
    else:
        runs, predicted = _of_step(plan, observer.runs)
        resident = plan.joined.problem.fixed_bytes
    base = observer.segment(runs[0].begin).level - resident
    ops: list[MeasuredOp] = []
    ran: set[int] = set()
    for run, steps in zip(runs, predicted, strict=True):
        for mark, step in _match(run, steps):
            measured = observer.segment(mark).peak - base
            ops.append(MeasuredOp(step.step, step.op, step.index in ran, step.bytes, measured))
            ran.add(step.index)
    unseen = sum(map(len, predicted)) - len(ops)
    return MeasuredTimeline(plan, tuple(ops), unseen, resident)


def _watch(
    step_function: Callable[[], object], warmup: int, device: torch.device | str
) -> Observer:
    """Call the step, and watch the last call."""
    if warmup < 0:
        raise InvalidOption(f"warmup is {warmup}; the number of calls before must be at least 0")
    for _ in range(warmup - 1):
        step_function()
    # The allocator knows the size of what is freed only if it was watched when it was allocated.
    with Allocations(device):
        if warmup:
            step_function()
    with Observer(device) as observer:
        result = step_function()
    del result
    return observer


@dataclass(frozen=True, slots=True)
class _Predicted:
    """A compute step: its place in the whole schedule, the op there and in its graph, bytes."""

    step: int
    op: Op
    index: int
    own: int
    bytes: int


def _plan_of(compiled: object) -> Plan | StepPlan:
    if isinstance(compiled, Compiled):
        step_plan, plans = compiled.step_plan, compiled.plans
    elif isinstance(compiled, Mapping):
        step_plan, plans = step_plan_of(compiled), plans_of(compiled)
    else:
        raise InvalidOption(
            f"measure_timeline was given {type(compiled).__name__} as compiled; it takes what "
            "remat.compile returned, or the options object given to torch.compile"
        )
    planned = [plan for plan in plans if isinstance(plan, Plan)]
    if any(plan.executor != "eager" for plan in planned):
        raise RematError(_by_another(planned))
    if step_plan is not None:
        return step_plan
    if len(planned) != 1:
        why = "; ".join(str(plan) for plan in plans if isinstance(plan, Unplanned))
        raise RematError(
            f"the step has {len(planned)} planned graphs and no plan as a whole"
            f"{f' ({why})' if why else ''}; a timeline is that of one graph, or of a step that "
            "was planned with a memory_budget"
        )
    return planned[0]


def _by_another(plans: Sequence[Plan]) -> str:
    """Why the steps of another executor cannot be watched one by one."""
    plan = max(plans, key=lambda plan: plan.peak)
    runs = {
        "inductor": "runs fused kernels in an order of its own, so its steps are not the plan's",
        "cudagraph": "replays a recording, in which nothing is allocated",
    }
    why = runs.get(plan.executor, "does not run the plan's steps one by one")
    return (
        f"executor={plan.executor!r} {why}. {plan.predicted} bytes were estimated as its peak, "
        f"plan.peak is {plan.peak}, and remat.measure says what a step takes. Compile with "
        'executor="eager" to see predicted against measured op by op'
    )


def _of_graph(plan: Plan, runs: Sequence[Run]) -> tuple[list[Run], list[list[_Predicted]]]:
    """The last forward of the graph, the backward after it, and what was predicted for each."""
    halves = [run for run in runs if run.label.plan.graph_hash == plan.graph_hash]
    kinds = [run.label.kind for run in halves]
    if "backward" not in kinds or "forward" not in kinds:
        raise RematError(
            f"the step ran {kinds.count('forward')} forwards and {kinds.count('backward')} "
            "backwards of the planned graph; step_function must run both, as a training step does"
        )
    last = max(at for at, kind in enumerate(kinds) if kind == "forward")
    after = [run for run in halves[last:] if run.label.kind == "backward"]
    chosen = [halves[last], after[0] if after else halves[-1]]
    schedule, boundary = plan.solution.schedule, plan.solution.schedule.boundary(plan.problem)
    _check_same(chosen[0], schedule)
    used = plan.solution.timeline.bytes
    both: list[list[_Predicted]] = [[], []]
    for at, step in enumerate(schedule.steps):
        if step.kind == "compute":
            op = plan.problem.ops[step.index]
            both[at >= boundary].append(_Predicted(at, op, step.index, step.index, used[at]))
    return chosen, both


def _of_step(plan: StepPlan, runs: Sequence[Run]) -> tuple[list[Run], list[list[_Predicted]]]:
    """The same for all phases of a step that are not eager code."""
    joined, used = plan.joined, plan.solution.timeline.bytes
    phases = [at for at, phase in enumerate(joined.phases) if phase.kind != "eager"]
    wanted = [joined.phases[at].kind for at in phases]
    ran = [run.label.kind for run in runs]
    if ran[-len(wanted) :] != wanted:
        raise RematError(
            f"the step ran {' '.join(ran) or 'no planned graph'}, its plan is for "
            f"{' '.join(wanted)}: the sequence of calls has changed, or more warmup is needed"
        )
    chosen = list(runs[-len(wanted) :])
    for run, at in zip(chosen, phases, strict=True):
        _check_same(run, plan.plans[joined.phases[at].call].solution.schedule)
    by_phase: dict[int, list[_Predicted]] = {at: [] for at in phases}
    inside = 0
    for position, step in enumerate(plan.solution.schedule.steps):
        if step.kind != "compute":
            continue
        origin = joined.origin[step.index]
        if origin is None:
            inside = joined.phase_of[step.index]
            continue
        op = joined.problem.ops[step.index]
        row = _Predicted(position, op, step.index, origin[1], used[position])
        by_phase[inside].append(row)
    return chosen, [by_phase[at] for at in phases]


def _check_same(run: Run, schedule: Schedule) -> None:
    ran: Schedule = run.label.plan.solution.schedule
    if ran.computes != schedule.computes:
        raise RematError(
            "the step ran with another plan than the one it has now: it was planned again in the "
            "meantime; measure the timeline again"
        )


def _match(run: Run, steps: Sequence[_Predicted]) -> list[tuple[int, _Predicted]]:
    """Each mark of a run, with its step."""
    marks, rows = iter(run.ops), []
    pending = next(marks, None)
    for step in steps:
        if pending is not None and pending[0] == step.own:
            rows.append((pending[1], step))
            pending = next(marks, None)
    if pending is not None:
        raise RematError(
            f"op {pending[0]} of the graph ran where its plan has none; report this with the model"
        )
    return rows
