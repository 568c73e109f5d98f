"""The judge: exact bytes at every step of a schedule, seconds, and every dependency checked.

Whoever made a schedule, this file says what it costs and whether it may run. It is written to be
read; the compiled evaluator that searches with is held equal to it by tests.

Bytes while an op runs = bytes alive + bytes it writes + its workspace (which is negative where it
writes over an input that dies). A second instance of a value
that is still alive counts beside the first and is dropped when the op returns. Tangents are there
from the first step of the backward part on, those that nobody reads to the end.

A transfer begins at its step, or when the transfer before it in the same direction is done; it goes
on beside the ops. What leaves stays alive until it is waited for and freed. What comes back counts
from the step of its reload on, may be read after its wait, and may come back again: the copy stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from remat.solvers.errors import InvalidSchedule
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Step, Timeline


def simulate(problem: Problem, schedule: Schedule, link: Link | None = None) -> Timeline:
    """Run ``schedule`` on paper.

    Args:
        link: where offloaded values go; needed if the schedule has transfer steps.

    Raises:
        InvalidSchedule: the first step that cannot run, and why.
    """
    _check_steps(problem, schedule)
    state = _State(problem, link)
    boundary = schedule.boundary(problem)
    for position, step in enumerate(schedule.steps):
        if position == boundary:
            state.enter_backward()
        state.run(position, step)
    if boundary == len(schedule.steps):
        state.enter_backward()
    state.finish()
    return state.timeline()


def _check_steps(problem: Problem, schedule: Schedule) -> None:
    for position, step in enumerate(schedule.steps):
        if step.kind not in ("compute", "free", "offload", "reload", "wait"):
            raise InvalidSchedule(f"step {position}: unknown kind {step.kind!r}")
        count = len(problem.ops if step.kind == "compute" else problem.values)
        if not 0 <= step.index < count:  # a negative index would quietly mean another op
            what = f"{step.kind} of index {step.index}"
            raise InvalidSchedule(f"step {position}: {what}; there are {count}")


@dataclass(slots=True)
class _Transfer:
    kind: str
    done: float


@dataclass
class _State:
    problem: Problem
    link: Link | None
    live: int = 0
    overwritten: int = 0  # of ``live``: what the op before wrote over, and nobody freed yet
    alive: set[int] = field(default_factory=set)
    runs: dict[int, int] = field(default_factory=dict)
    next_backward: int = 0
    next_forward: int = 0
    in_backward: bool = False
    seconds: float = 0.0
    flops: int = 0
    forward_seconds: float = 0.0
    forward_flops: int = 0
    bytes: list[int] = field(default_factory=list)
    forward_steps: int = 0
    peak: int = -1
    peak_step: int = -1
    alive_at_peak: tuple[int, ...] = ()
    stored: set[int] = field(default_factory=set)
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    offload_free_at: float = 0.0
    reload_free_at: float = 0.0

    def __post_init__(self) -> None:
        self.live = self.problem.fixed_bytes
        read = {value for op in self.problem.ops for value in op.reads}
        self.unread_tangents = set(self.problem.tangents) - read

    def enter_backward(self) -> None:
        self.in_backward = True
        self.forward_seconds, self.forward_flops = self.seconds, self.flops
        self.forward_steps = len(self.bytes)
        for value in self.problem.dropped:
            if value in self.alive:
                why = "is there when backward starts, but may not be kept"
                self._refuse(self.forward_steps, f"{self._name(value)} {why}")
        for value in self.problem.tangents:
            self._allocate(value)

    def run(self, position: int, step: Step) -> None:
        getattr(self, f"_{step.kind}")(position, step.index)

    def _compute(self, position: int, index: int) -> None:
        op = self.problem.ops[index]
        self._check_turn(position, index)
        for value in op.reads:
            if self.problem.values[value].owned:
                continue
            reads = f"op {op.name!r} reads {self._name(value)}"
            if value not in self.alive:
                self._refuse(position, f"{reads}, which is not there")
            if value in self.transfers and self.transfers[value].kind == "reload":
                self._refuse(position, f"{reads} without a wait")
        again = sum(self.problem.values[v].bytes for v in op.writes if v in self.alive)
        for value in op.writes:
            self._allocate(value)
        self.seconds += op.seconds
        self.flops += op.flops
        self.runs[index] = self.runs.get(index, 0) + 1
        self.overwritten = max(0, -(again + op.workspace))
        self._note(self.live + again + op.workspace)

    def _check_turn(self, position: int, index: int) -> None:
        op, first = self.problem.ops[index], index not in self.runs
        if not first and op.phase == "backward":
            self._refuse(position, f"backward op {op.name!r} runs twice")
        if not first and not op.rerunnable:
            self._refuse(position, f"op {op.name!r} may not be run again")
        if not first and not self.in_backward:
            self._refuse(position, f"op {op.name!r} is recomputed before forward has ended")
        if first and op.phase == "forward":
            if self.problem.forward[self.next_forward] != index:
                self._refuse(position, f"forward op {op.name!r} runs out of program order")
            self.next_forward += 1
        if first and op.phase == "backward":
            if not self.in_backward:
                self._refuse(position, f"backward op {op.name!r} runs before forward has ended")
            if self.problem.backward[self.next_backward] != index:
                self._refuse(position, f"backward op {op.name!r} runs out of program order")
            self.next_backward += 1

    def _free(self, position: int, value: int) -> None:
        held = self.problem.values[value]
        if held.owned or held.output or value in self.unread_tangents:
            kind = (
                "the caller owns it" if held.owned
                else "it is an output" if held.output
                else "it has no reader, so backward holds it to the end"
            )  # fmt: skip
            self._refuse(position, f"frees {self._name(value)}, but {kind}")
        if value not in self.alive:
            self._refuse(position, f"frees {self._name(value)}, which is not there")
        if value in self.transfers:
            self._refuse(position, f"frees {self._name(value)} while it is being copied")
        self.alive.discard(value)
        self.live -= held.bytes
        # Where the op before wrote over this value there is nothing left to free.
        self.overwritten = max(0, self.overwritten - held.bytes)
        self._note(self.live - self.overwritten)

    def _offload(self, position: int, value: int) -> None:
        link, held = self._link(position), self.problem.values[value]
        if held.owned or held.output or not held.offloadable:
            kind = "is an output" if held.output else "may not be offloaded"
            self._refuse(position, f"offloads {self._name(value)}, which {kind}")
        if value not in self.alive or value in self.transfers:
            self._refuse(position, f"offloads {self._name(value)}, which is not there or in flight")
        start = max(self.seconds, self.offload_free_at)
        self.offload_free_at = start + link.seconds_out(held.bytes)
        self.transfers[value] = _Transfer("offload", self.offload_free_at)
        self._note(self.live - self.overwritten)

    def _reload(self, position: int, value: int) -> None:
        link, held = self._link(position), self.problem.values[value]
        if value not in self.stored or value in self.alive or value in self.transfers:
            name = self._name(value)
            self._refuse(position, f"reloads {name}, which was not offloaded and freed")
        start = max(self.seconds, self.reload_free_at)
        self.reload_free_at = start + link.seconds_back(held.bytes)
        self.transfers[value] = _Transfer("reload", self.reload_free_at)
        self._allocate(value)
        self._note(self.live - self.overwritten)

    def _wait(self, position: int, value: int) -> None:
        if value not in self.transfers:
            self._refuse(position, f"waits for {self._name(value)}, which is not in flight")
        transfer = self.transfers.pop(value)
        self.seconds = max(self.seconds, transfer.done)
        if transfer.kind == "offload":
            self.stored.add(value)
        self._note(self.live - self.overwritten)

    def finish(self) -> None:
        end = len(self.bytes)
        if self.next_forward < len(self.problem.forward):
            name = self.problem.ops[self.problem.forward[self.next_forward]].name
            self._refuse(end, f"forward op {name!r} never runs")
        if self.next_backward < len(self.problem.backward):
            name = self.problem.ops[self.problem.backward[self.next_backward]].name
            self._refuse(end, f"backward op {name!r} never runs")
        for index, value in enumerate(self.problem.values):
            if value.output and not value.owned and index not in self.alive:
                self._refuse(end, f"the output {value.name!r} is not there at the end")
        if self.transfers:
            self._refuse(end, f"{self._name(next(iter(self.transfers)))} is still in flight")

    def timeline(self) -> Timeline:
        fixed = self.problem.fixed_bytes
        return Timeline(
            bytes=tuple(self.bytes),
            peak=max(self.peak, fixed),
            peak_step=self.peak_step,
            alive_at_peak=self.alive_at_peak,
            seconds=self.seconds,
            flops=self.flops,
            forward_seconds=self.forward_seconds,
            forward_flops=self.forward_flops,
            forward_peak=max(self.bytes[: self.forward_steps], default=fixed),
            backward_peak=max(self.bytes[self.forward_steps :], default=fixed),
        )

    def _allocate(self, value: int) -> None:
        if value not in self.alive:
            self.alive.add(value)
            self.live += self.problem.values[value].bytes

    def _note(self, used: int) -> None:
        self.bytes.append(used)
        if used > self.peak:
            self.peak, self.peak_step = used, len(self.bytes) - 1
            self.alive_at_peak = tuple(sorted(self.alive))

    def _link(self, position: int) -> Link:
        if self.link is None:
            self._refuse(position, "transfers a value, but there is no link")
        return self.link

    def _name(self, value: int) -> str:
        return repr(self.problem.values[value].name)

    def _refuse(self, position: int, why: str) -> NoReturn:
        raise InvalidSchedule(f"step {position}: {why}")
