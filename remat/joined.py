"""Several graphs of one step as one problem, so that one solver and one judge price them all.

Calls ``c1 … cn`` run forward in this order, and their backwards in the order that was recorded.
While one of them runs, bytes are alive *beside* the graphs: what passes between them, gradients
that are there already, what eager code holds. These do not depend on any plan, and were measured.

The joined problem has the ops of every call, each phase between two ops of its own::

    forward:  begin writes [beside]             …  end reads [beside], what the call returned
    backward: begin writes [beside], tangents   …  end reads both, and the call's gradients
    eager:    one op whose workspace is all that is alive beside the graphs at its peak

What a call returns, and its gradients, end with their phase: later they are alive beside. So a
returned value that its own backward reads is free there, and is there to compute from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from remat.solvers.problem import Op, Problem, Value
from remat.solvers.schedule import Schedule, Step, Timeline, with_frees

EAGER: Final = "eager code between the graphs"
BETWEEN: Final = "between the graphs"
"""The layer of what belongs to no call, in :attr:`Joined.problem_by_call`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step in which one thing runs.

    Attributes:
        kind: a call's forward or backward, or code that no graph holds.
        call: which call; for ``eager``, -1.
        beside: bytes alive that belong to no call: at the phase's begin, or, for ``eager``, at its
            peak. What is resident when the step begins is not among them.
    """

    kind: Literal["forward", "backward", "eager"]
    call: int
    beside: int


@dataclass(frozen=True)
class Joined:
    """The problem of a whole step, and the way back to its calls.

    Attributes:
        problem: of the whole step.
        calls: the problem of each call.
        phases: in the order they run.
        origin: for every op, its call and its index there; None for what stands between.
        phase_of: for every op, the phase it stands in.
        owner: for every value, its call and its index there; None for what is beside them.
    """

    problem: Problem
    calls: tuple[Problem, ...]
    phases: tuple[Phase, ...]
    origin: tuple[tuple[int, int] | None, ...]
    phase_of: tuple[int, ...]
    owner: tuple[tuple[int, int] | None, ...]

    @property
    def problem_by_call(self) -> Problem:
        """The problem with layers named by their call, where there are several: two graphs may have
        one name for two layers.
        """
        several, ops = len(self.calls) > 1, []
        for op, origin in zip(self.problem.ops, self.origin, strict=True):
            layer = BETWEEN if origin is None else op.layer
            if several and origin is not None:
                layer = f"call.{origin[0]}.{op.layer}".removesuffix(".")
            ops.append(replace(op, layer=layer))
        return replace(self.problem, ops=tuple(ops))

    def schedule(self, schedules: Sequence[Schedule]) -> Schedule:
        """One schedule for each call, as one of the whole step."""
        op_of = {origin: index for index, origin in enumerate(self.origin) if origin is not None}
        value_of = {owner: index for index, owner in enumerate(self.owner) if owner is not None}
        halves = [_halves(p, s) for p, s in zip(self.calls, schedules, strict=True)]
        betweens: list[list[int]] = [[] for _ in self.phases]
        for index, at in enumerate(self.phase_of):
            if self.origin[index] is None:
                betweens[at].append(index)
        steps: list[Step] = []
        for between, phase in zip(betweens, self.phases, strict=True):
            begin, *end = (Step("compute", index) for index in between)
            steps.append(begin)
            if phase.kind != "eager":
                for step in halves[phase.call][phase.kind == "backward"]:
                    index_of = op_of if step.kind == "compute" else value_of
                    steps.append(Step(step.kind, index_of[phase.call, step.index]))
            steps += end
        return with_frees(self.problem, steps)

    def split(self, schedule: Schedule) -> tuple[Schedule, ...]:
        """The part of each call in a schedule of the whole step.

        A copy that another call was to hide is waited for where its own forward ends.
        """
        parts: list[list[Step]] = [[] for _ in self.calls]
        left = [len(problem.forward) for problem in self.calls]
        began = [False for _ in self.calls]
        for step in schedule.steps:
            computes = step.kind == "compute"
            origin = (self.origin if computes else self.owner)[step.index]
            if computes and origin is None and self._begins_backward(step.index):
                began[self.phases[self.phase_of[step.index]].call] = True
            if origin is None or step.kind == "free":
                continue
            call, index = origin
            if computes and self.calls[call].ops[index].phase == "forward":
                left[call] -= 1
            if step.kind == "wait" and left[call] == 0 and not began[call]:
                at = _last_forward(self.calls[call], parts[call])
                at = max(at, 1 + parts[call].index(Step("offload", index)))
                parts[call].insert(at, Step("wait", index))
            else:
                parts[call].append(Step(step.kind, index))
        return tuple(with_frees(*part) for part in zip(self.calls, parts, strict=True))

    def _begins_backward(self, op: int) -> bool:
        return self.phases[self.phase_of[op]].kind == "backward"

    def peaks(self, schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
        """The peak of each phase, in bytes."""
        peaks = [self.problem.fixed_bytes] * len(self.phases)
        at = 0
        for step, used in zip(schedule.steps, timeline.bytes, strict=True):
            # Between its begin and its end, a backward runs forward ops again.
            if step.kind == "compute" and self.origin[step.index] is None:
                at = self.phase_of[step.index]
            peaks[at] = max(peaks[at], used)
        return tuple(peaks)


def join(calls: Sequence[Problem], phases: Sequence[Phase], resident: int) -> Joined:
    """The problem of a step that makes these calls.

    Args:
        calls: the problem of each call, in the order of their forwards; one that stands here
            twice is called twice.
        phases: the forward of each call once, its backward once, forwards first.
        resident: bytes alive when the step begins.
    """
    builder = _Builder(tuple(calls))
    for at, phase in enumerate(phases):
        builder.add(at, phase)
    problem = Problem(
        tuple(builder.values),
        tuple(builder.ops),
        resident,
        name=f"a step of {len(calls)} graph calls",
        cost=calls[0].cost if calls else "",
    )
    return Joined(
        problem,
        tuple(calls),
        tuple(phases),
        tuple(builder.origin),
        tuple(builder.phase_of),
        tuple(builder.owner),
    )


def _halves(problem: Problem, schedule: Schedule) -> tuple[list[Step], list[Step]]:
    boundary = schedule.boundary(problem)
    forward = [step for step in schedule.steps[:boundary] if step.kind != "free"]
    backward = [step for step in schedule.steps[boundary:] if step.kind != "free"]
    return forward, backward


def _last_forward(problem: Problem, steps: Sequence[Step]) -> int:
    """The position of the last forward op."""
    return max(
        position
        for position, step in enumerate(steps)
        if step.kind == "compute" and problem.ops[step.index].phase == "forward"
    )


@dataclass
class _Builder:
    calls: tuple[Problem, ...]
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    origin: list[tuple[int, int] | None] = field(default_factory=list)
    phase_of: list[int] = field(default_factory=list)
    value_of: dict[tuple[int, int], int] = field(default_factory=dict)
    owner: list[tuple[int, int] | None] = field(default_factory=list)

    def add(self, at: int, phase: Phase) -> None:
        if phase.kind == "eager":
            when: Literal["forward", "backward"] = "backward" if self._in_backward() else "forward"
            self._between(at, Op(f"{at}: eager", when, (), (), workspace=phase.beside))
        elif phase.kind == "forward":
            self._add_forward(at, phase)
        else:
            self._add_backward(at, phase)

    def _in_backward(self) -> bool:
        return bool(self.ops) and self.ops[-1].phase == "backward"

    def _add_forward(self, at: int, phase: Phase) -> None:
        call, problem = phase.call, self.calls[phase.call]
        for v, value in enumerate(problem.values):
            self.value_of[call, v] = len(self.values)
            self.owner.append((call, v))
            returned = value.output == "forward" and problem.producer[v] >= 0
            self.values.append(
                replace(
                    value,
                    name=f"{call}: {value.name}",
                    owned=value.owned or returned,
                    tangent=False,
                    output=None,
                )
            )
        beside = self._value(f"{at}: beside the graphs", phase.beside)
        self._between(at, Op(f"{at}: begin", "forward", (), (beside,)))
        returned_values: list[int] = []
        for index, op in enumerate(problem.ops):
            if op.phase != "backward":
                returned_values += self._add_op(at, call, index)
        self._between(at, Op(f"{at}: end", "forward", (beside, *returned_values), ()))

    def _add_op(self, at: int, call: int, index: int) -> list[int]:
        """The op; answers the values it returns to the caller, which are others to its readers."""
        problem, op = self.calls[call], self.calls[call].ops[index]
        writes, returned = [], []
        for v in op.writes:
            value = problem.values[v]
            if value.output == "forward":
                returned.append(self._value(f"{call}: {value.name}.returned", value.bytes))
            else:
                writes.append(self.value_of[call, v])
        # A gradient that forward makes already is held from then on.
        held = op.phase != "backward" and any(
            problem.values[v].output == "backward" for v in op.writes
        )
        self.origin.append((call, index))
        self.phase_of.append(at)
        self.ops.append(
            replace(
                op,
                name=f"{call}: {op.name}",
                reads=tuple(self.value_of[call, v] for v in op.reads),
                writes=(*writes, *returned),
                rerunnable=op.rerunnable and not held,
            )
        )
        return returned

    def _add_backward(self, at: int, phase: Phase) -> None:
        call, problem = phase.call, self.calls[phase.call]
        beside = self._value(f"{at}: beside the graphs", phase.beside)
        tangents = [self.value_of[call, v] for v in problem.tangents]
        self._between(at, Op(f"{at}: begin", "backward", (), (beside, *tangents)))
        for index, op in enumerate(problem.ops):
            if op.phase == "backward":
                self._add_op(at, call, index)
        # A tangent that is no output dies at its last reader; one without readers is held as well.
        read = {v for op in problem.ops for v in op.reads}
        held = [
            self.value_of[call, v]
            for v, value in enumerate(problem.values)
            if (value.output == "backward" and not value.owned) or (value.tangent and v not in read)
        ]
        self._between(at, Op(f"{at}: end", "backward", (beside, *held), ()))

    def _value(self, name: str, size: int) -> int:
        self.owner.append(None)
        self.values.append(Value(name, size, offloadable=False))
        return len(self.values) - 1

    def _between(self, at: int, op: Op) -> None:
        self.origin.append(None)
        self.phase_of.append(at)
        self.ops.append(replace(op, target=EAGER, rerunnable=False))
