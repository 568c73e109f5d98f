"""One training step as a session sees it: calls of graphs, their backwards, the bytes in between.

A step begins with a call of a graph while none waits for its backward, and lasts until the next
such call. What it was seen to do becomes phases (:mod:`remat.joined`): the bytes alive at the begin
of each, less what the waiting calls are known to keep, are alive beside the graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch

from remat.joined import Phase
from remat.passes.levels import Levels, Segment
from remat.passes.torch_private import autograd
from remat.plans import Plan

_NOT_SEEN: Final = -1
_UNFORESEEN: Final = 0.02
"""A backward that takes so much more than planned is taken for the plan's; more than that is code
outside the graph, whose bytes no plan changes."""


@dataclass(eq=False)
class Call:
    """One call of a captured graph.

    Attributes:
        graph: which; calls of one graph compare equal.
        plan: what it ran with.
        backwards: how often its backward has run.
    """

    graph: Hashable
    plan: Plan
    backwards: int = 0
    _node: weakref.ref[Any] | None = None

    def watch(
        self,
        node: object,
        begins: Callable[[Call, Sequence[Any]], None],
        dropped: Callable[[], None],
    ) -> None:
        """Remember the autograd node of the call.

        Args:
            begins: called before the node runs.
            dropped: called when nobody can run it any more.
        """
        self._node = weakref.ref(node, lambda _: dropped())
        autograd.before_backward(node, lambda gradients: begins(self, gradients))

    @property
    def waits(self) -> bool:
        """Whether it still holds what it kept for its backward."""
        node = None if self._node is None else self._node()
        if node is None:
            return False
        return self.backwards == 0 or autograd.count_holding((node,)) == 1


@dataclass(frozen=True, slots=True)
class Event:
    """A forward or a backward of the ``call``-th call of a step.

    Attributes:
        begin, end: marks in the recording; -1 where there is none. A backward has no end of its
            own: what follows it up to the next mark counts as a part of it.
        gradients: bytes of the gradients that arrive with a backward.
    """

    kind: Literal["forward", "backward"]
    call: int
    begin: int = _NOT_SEEN
    end: int = _NOT_SEEN
    gradients: int = 0

    @property
    def seen(self) -> bool:
        """Whether it was watched."""
        return self.begin != _NOT_SEEN and (self.kind == "backward" or self.end != _NOT_SEEN)


@dataclass
class Step:
    """The step that lasts.

    Attributes:
        calls, events: so far.
        moving: bytes of gradients and optimizer state when it began.
        levels: the recording, if there is one.
        begin: its first mark.
        earlier: phases that are known from elsewhere, of the events before the recording began.
        sizes: storage → bytes of what was there when the step began, as far as it was seen.
        resident_before: bytes that were there for sure.
        inputs: of the first call, where nothing is recorded.
        ended: all calls had had their backward when a backward ended.
        in_backward: a backward runs that has reached a call, and did not end yet.
        retained: a backward that was watched did not free what forward had saved.
    """

    moving: int
    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    levels: Levels | None = None
    begin: int = _NOT_SEEN
    earlier: tuple[Phase, ...] = ()
    sizes: dict[int, int] = field(default_factory=dict)
    resident_before: int = 0
    inputs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    ended: bool = False
    in_backward: bool = False
    retained: bool = False

    @property
    def waiting(self) -> bool:
        """Whether a call waits for its backward."""
        return any(call.waits for call in self.calls)

    @property
    def given(self) -> list[torch.Tensor]:
        """What is left of ``inputs``."""
        return [tensor for ref in self.inputs if (tensor := ref()) is not None]

    @property
    def sequence(self) -> tuple[tuple[Hashable, ...], tuple[tuple[str, int], ...]]:
        """The graphs in the order they were called, then the order of all events."""
        order = tuple((event.kind, event.call) for event in self.events)
        return (tuple(call.graph for call in self.calls), order)

    @property
    def resident(self) -> int:
        """Bytes of what was seen to be there when the step began."""
        return max(self.resident_before, sum(self.sizes.values()))

    def record(self, device: torch.device, level: int = 0) -> None:
        """Begin to watch the allocator; nothing if somebody else's profiler runs."""
        levels = Levels(device, level)
        if levels.start():
            self.levels, self.begin = levels, levels.mark()

    def interrupt(self) -> bool:
        """Stop watching for a while; whether it was watched."""
        watched = self.levels is not None and self.levels.running
        if watched:
            assert self.levels is not None
            self.levels.stop()
        return watched

    def forget(self) -> None:
        """Watch no longer, and drop what was seen."""
        self.interrupt()
        self.levels = None

    def resume(self) -> None:
        """Watch again after :meth:`interrupt`."""
        if self.levels is not None and not self.levels.running and not self.levels.start():
            self.levels = None

    def mark(self) -> int:
        """A mark in the recording, or -1."""
        if self.levels is None or not self.levels.running:
            return _NOT_SEEN
        return self.levels.mark()

    def enter(self, graph: Hashable, plan: Plan) -> Call:
        """A call begins."""
        call = Call(graph, plan)
        self.events.append(Event("forward", len(self.calls), self.mark()))
        self.calls.append(call)
        return call

    def leave(self, call: Call, result: Any) -> None:
        """It returns ``result``."""
        node = autograd.backward_node(result)
        event = self.events[-1]
        self.events[-1] = Event("forward", event.call, event.begin, self.mark())
        if node is not None:
            call.watch(node, self._backward, self._dropped)

    def _backward(self, call: Call, gradients: Sequence[Any]) -> None:
        call.backwards += 1
        index = next(i for i, other in enumerate(self.calls) if other is call)
        sizes = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gradients
            if isinstance(t, torch.Tensor)
        }
        self.events.append(Event("backward", index, self.mark(), gradients=sum(sizes.values())))
        if self.levels is not None and self.levels.running and not self.in_backward:
            self.in_backward = True
            autograd.at_end_of_backward(self._backward_ended)
            autograd.when_backward_returns(self._backward_returned)

    def _backward_ended(self) -> None:
        self.in_backward = False
        # What is held on is held by the caller's wish, and by no plan.
        self.retained |= any(call.backwards and call.waits for call in self.calls)
        if self.levels is None or not self.levels.running or self.ended:
            return
        if not any(call.waits and call.backwards == 0 for call in self.calls):
            self.ended = True
            self.levels.mark()

    # The recording must not outlast the step: a profiler of the user's could not start.

    def _backward_returned(self) -> None:
        """It has ended, or an error has ended it."""
        if autograd.runs_backward():
            autograd.when_backward_returns(self._backward_returned)
        elif self.in_backward or self.ended:
            failed, self.in_backward = self.in_backward, False
            self.forget() if failed else self.interrupt()

    def _dropped(self) -> None:
        """Nobody can run the backward of a call any more."""
        if not (self.waiting or self.in_backward or autograd.runs_backward()):
            self.interrupt()

    def phases(self) -> tuple[tuple[int, ...], tuple[Phase, ...]] | None:
        """(calls that can be planned, phases), or None if the step was not watched to its end.

        A call whose backward did not run exactly once, or whose forward ran after a backward had
        begun, is no graph here but code beside the graphs.
        """
        if self.levels is None:
            return None
        self.levels.stop()
        if self.levels.lost or self.retained:
            return None
        skip = sum(phase.kind != "eager" for phase in self.earlier)
        planned = self._planned()
        if not planned or any(not event.seen for event in self.events[skip:]):
            return None
        reader = _Reader(self, planned, self.levels.segments)
        if not self.earlier:
            reader.eager(self.levels.segments[self.begin].peak)
        reader.phases += self.earlier
        for event in self.events[:skip]:
            reader.pass_over(event)
        for event in self.events[skip:]:
            reader.read(event)
        order = {call: at for at, call in enumerate(planned)}
        phases = (Phase(p.kind, order.get(p.call, -1), p.beside) for p in reader.phases)
        return planned, tuple(phases)

    def _planned(self) -> tuple[int, ...]:
        first = next((i for i, e in enumerate(self.events) if e.kind == "backward"), 0)
        before = {event.call for event in self.events[:first]}
        return tuple(i for i, call in enumerate(self.calls) if i in before and call.backwards == 1)


class _Reader:
    """Turns events and segments into phases, call after call."""

    def __init__(self, step: Step, planned: Iterable[int], segments: Sequence[Segment]) -> None:
        self.step = step
        self.planned = set(planned)
        self.segments = segments
        self.phases: list[Phase] = []
        self.kept: dict[int, int] = {}

    def pass_over(self, event: Event) -> None:
        """An event whose phase is known already."""
        if event.call not in self.planned:
            return
        if event.kind == "backward":
            self.kept.pop(event.call, None)
        else:
            plan = self.step.calls[event.call].plan
            self.kept[event.call] = plan.kept_bytes

    def read(self, event: Event) -> None:
        if event.call not in self.planned:
            self.eager(self.segments[event.begin].peak)
        elif event.kind == "forward":
            self._add(event, self.segments[event.begin].level)
            self.pass_over(event)
        else:
            self._read_backward(event)
        if event.kind == "forward":
            self.eager(self.segments[event.end].peak)

    def _read_backward(self, event: Event) -> None:
        plan = self.step.calls[event.call].plan
        problem, segment = plan.problem, self.segments[event.begin]
        counted = sum(problem.values[value].bytes for value in problem.tangents)
        beside = self._add(event, segment.level - min(counted, event.gradients))
        self.pass_over(event)
        # Plans of one graph say that an incoming gradient ends with its last reader.
        own = plan.solution.timeline.backward_peak - problem.fixed_bytes + counted
        own += max(0, plan.peak - plan.predicted)  # so much more the generated code takes
        more = segment.peak - (beside + self.waiting + own)
        if 0 < more <= _UNFORESEEN * own:
            self.phases[-1] = replace(self.phases[-1], beside=beside + more)
        elif more > 0:
            self.eager(segment.peak)

    def _add(self, event: Event, level: int) -> int:
        beside = max(0, level - self.waiting)
        self.phases.append(Phase(event.kind, event.call, beside))
        return beside

    def eager(self, peak: int) -> None:
        self.phases.append(Phase("eager", -1, max(0, peak - self.waiting)))

    @property
    def waiting(self) -> int:
        return sum(self.kept.values())
