"""Watching compiled graphs run, op by op: the bytes in use while each op of a plan runs.

A graph that the eager executor runs can be watched at any time. While an :class:`Observer` is
active, a copy of the graph runs that leaves a mark before each op; else the graph itself runs, and
being watchable costs one comparison a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, TracebackType
from typing import Any, Final, Literal

import torch
from torch import fx

from remat.passes.allocations import PROFILER_RUNS, watched_device
from remat.passes.levels import Levels, Segment
from remat.passes.split import OP_INDEX
from remat.passes.torch_private import partition as private
from remat.passes.torch_private import profiling
from remat.solvers.errors import RematError

Kind = Literal["forward", "backward"]

_LABEL: Final = "remat_label"


@dataclass(frozen=True)
class Label:
    """What a graph is half of.

    Attributes:
        kind: which half.
        plan: the plan it was compiled for.
        op_of: name of a node → the op of the plan's problem, for graphs that are torch's own.
    """

    kind: Kind
    plan: Any
    op_of: Mapping[str, int]


@dataclass
class Run:
    """One run of a watched graph.

    Attributes:
        label: what it is half of.
        begin, end: marks around it.
        ops: (op of the plan's problem, mark before it), in the order they ran.
    """

    label: Label
    begin: int = -1
    end: int = -1
    ops: list[tuple[int, int]] = field(default_factory=list)


class Observer:
    """The runs of labelled graphs on one device while the ``with`` block lasts.

    Attributes:
        runs: in the order they began.
        levels: the recording; its ``segments`` are complete after the block. The peak of a segment
            is what was in use, at most, while the op behind its mark ran.

    Raises:
        RematError: a torch profiler runs on this thread, another observer is active, or the device
            is neither cpu nor cuda.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = watched_device(device)
        self.levels = Levels(self.device)
        self.runs: list[Run] = []
        self._open: list[Run] = []

    def __enter__(self) -> Observer:
        global _observer
        if _observer is not None:
            raise RematError("a step is being watched already; watch one at a time")
        if self.device.type == "cpu" and (owner := profiling.yielding()) is not None:
            owner.make_way()
        if not self.levels.start():
            raise RematError(PROFILER_RUNS)
        _observer = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _observer
        _observer = None
        self.levels.stop()

    def segment(self, mark: int) -> Segment:
        """What happened between a mark and the next."""
        return self.levels.segments[mark]

    def run(self, label: Label, call: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run a graph that leaves marks."""
        run = Run(label, begin=self.levels.mark())
        self.runs.append(run)
        self._open.append(run)
        try:
            return call(inputs)
        finally:
            self._open.pop()
            run.end = self.levels.mark()

    def mark(self, op: int) -> None:
        """The op is about to run."""
        self._open[-1].ops.append((op, self.levels.mark()))


# Backward may run on a thread of the engine's, so this is no context variable.
_observer: Observer | None = None


def label(
    forward: fx.GraphModule, backward: fx.GraphModule, plan: Any, op_of: Mapping[str, int]
) -> None:
    """Say what two graphs are halves of; what is not labelled is not watched."""
    forward.meta[_LABEL] = Label("forward", plan, op_of)
    backward.meta[_LABEL] = Label("backward", plan, op_of)


def watchable(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What :func:`private.boxed` answers, marking its ops while an observer is active."""
    plain = private.boxed(graph, example_inputs)
    found: Label | None = graph.meta.get(_LABEL)
    if found is None or not isinstance(plain, FunctionType):  # torch caches what it returns
        return plain
    watched: list[Callable[..., Any]] = []

    def run(inputs: list[Any]) -> Any:
        observer = _observer
        if observer is None:
            return plain(inputs)
        if not watched:
            watched.append(private.boxed(_with_marks(graph, found), example_inputs))
        return observer.run(found, watched[0], inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_marks(graph: fx.GraphModule, found: Label) -> fx.GraphModule:
    marked = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    nodes = list(marked.graph.nodes)
    emitted = any(OP_INDEX in node.meta for node in nodes)  # else the graph is torch's own
    for node in nodes:
        op = node.meta.get(OP_INDEX) if emitted else found.op_of.get(node.name)
        if node.op == "call_function" and op is not None:
            with marked.graph.inserting_before(node):
                marked.graph.call_function(_mark, (op,))
    return marked


def _mark(op: int) -> None:
    if _observer is not None:
        _observer.mark(op)
