"""What a plan does, row by row: to each value, to each layer, to each half of the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from remat.solvers.problem import Problem
from remat.solvers.schedule import Decision, Schedule, Timeline, decisions

Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What happens to one forward value that backward needs.

    Attributes:
        value: its name.
        action: ``"keep"``, ``"recompute"`` or ``"offload"``.
        bytes: what it takes.
        layer, source: the module and the source line of the op that makes it.
        seconds: what running that op again costs in all; its other outputs share it.
    """

    value: str
    action: Action
    bytes: int
    layer: str
    source: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What a plan does to one layer, in bytes and seconds.

    Attributes:
        layer: the module's path; empty for what belongs to none.
        baseline_bytes: saved for backward without remat.
        kept_bytes, recomputed_bytes, offloaded_bytes: what becomes of the values backward needs.
        extra_seconds: what running the layer's ops again costs.
    """

    layer: str
    baseline_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    extra_seconds: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One half of the step, without remat and with it. Recomputation belongs to backward."""

    phase: Literal["forward", "backward"]
    baseline_seconds: float
    seconds: float
    baseline_flops: int
    flops: int
    baseline_peak: int
    peak: int


def decision_rows(problem: Problem, schedule: Schedule) -> dict[str, DecisionRow]:
    """For every forward value that backward reads, by name, in program order."""
    again = runs_again(schedule)
    rows = {}
    for value, decision in decisions(problem, schedule).items():
        producer = problem.producer[value]
        op, held = problem.ops[producer], problem.values[value]
        rows[held.name] = DecisionRow(
            value=held.name,
            action=decision.value,
            bytes=held.bytes,
            layer=op.layer,
            source=op.source,
            seconds=again[producer] * op.seconds,
        )
    return rows


def layer_rows(problem: Problem, schedule: Schedule, baseline: Schedule) -> tuple[LayerRow, ...]:
    """One row for each layer that saves or recomputes anything, in program order."""
    layers = dict.fromkeys(op.layer for op in problem.ops)
    saved = _bytes_by_layer(problem, baseline, Decision.KEEP)
    kept, recomputed, offloaded = (
        _bytes_by_layer(problem, schedule, decision)
        for decision in (Decision.KEEP, Decision.RECOMPUTE, Decision.OFFLOAD)
    )
    extra: dict[str, float] = {}
    for index, times in runs_again(schedule).items():
        op = problem.ops[index]
        extra[op.layer] = extra.get(op.layer, 0.0) + times * op.seconds
    rows = (
        LayerRow(x, saved[x], kept[x], recomputed[x], offloaded[x], extra.get(x, 0.0))
        for x in layers
    )
    return tuple(row for row in rows if any(getattr(row, f) for f in row.__slots__[1:]))


def phase_rows(old: Timeline, new: Timeline) -> tuple[PhaseRow, PhaseRow]:
    """Forward and backward, without remat (``old``) and with it."""
    forward = PhaseRow(
        "forward",
        old.forward_seconds,
        new.forward_seconds,
        old.forward_flops,
        new.forward_flops,
        old.forward_peak,
        new.forward_peak,
    )
    backward = PhaseRow(
        "backward",
        old.seconds - old.forward_seconds,
        new.seconds - new.forward_seconds,
        old.flops - old.forward_flops,
        new.flops - new.forward_flops,
        old.backward_peak,
        new.backward_peak,
    )
    return forward, backward


def kept_bytes(problem: Problem, schedule: Schedule) -> int:
    """Bytes that wait for backward once forward has ended, what forward returns aside."""
    alive: set[int] = set()
    for step in schedule.steps[: schedule.boundary(problem)]:
        if step.kind == "free":
            alive.discard(step.index)
        elif step.kind == "compute":
            alive.update(problem.ops[step.index].writes)
    return sum(
        problem.values[value].bytes for value in alive if problem.values[value].output != "forward"
    )


def runs_again(schedule: Schedule) -> Counter[int]:
    """How often each op runs beyond the first time."""
    runs = Counter(schedule.computes)
    return Counter({op: times - 1 for op, times in runs.items() if times > 1})


def _bytes_by_layer(problem: Problem, schedule: Schedule, wanted: Decision) -> Counter[str]:
    total: Counter[str] = Counter()
    for value, decision in decisions(problem, schedule).items():
        if decision is wanted:
            layer = problem.ops[problem.producer[value]].layer
            total[layer] += problem.values[value].bytes
    return total
