"""The graph of a whole training step: loss, gradients, and updates of what the caller owns.

Forward is what was traced before the first backward began; all else runs once, in order. There is
no boundary at which tensors are handed over, so nothing has to be saved: every value of forward may
be kept, or computed again, anywhere behind it.

Writes into inputs are *updates*: ``copy_`` of a new content, placed by :mod:`remat.passes.updates`.
Numbers read out of tensors (an optimizer's count of steps) are no values; who reads one reads the
storage it came from.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx

from remat.passes import ops
from remat.passes.joint import JointGraph
from remat.passes.storages import Storages, tensors_of
from remat.passes.torch_private.tracing import SPAN
from remat.solvers.errors import CaptureError
from remat.solvers.problem import Phase

_COPY: Final = torch.ops.aten.copy_.default
_FRAME: Final = re.compile(r'^ *File "', re.MULTILINE)


@dataclass(frozen=True)
class Update:
    """The input ``target`` gets the new content ``content``."""

    target: fx.Node
    content: fx.Node


@dataclass(frozen=True)
class StepGraph(JointGraph):
    """A functional graph of a whole step; its outputs are what it returns, then the new contents.

    It is read like a joint graph without primals and tangents: nothing arrives in the middle, and
    autograd accumulates nothing behind it.

    Attributes:
        returned: how many of the outputs the caller gets.
        updates: one for each input that is written.
    """

    returned: int = 0
    updates: tuple[Update, ...] = ()

    @staticmethod
    def of(module: fx.GraphModule) -> StepGraph:
        """Read a functional graph of :func:`remat.passes.torch_private.tracing.trace_functional`.

        Raises:
            CaptureError: it computes no gradients, or has a node that cannot be planned.
        """
        graph = module.graph
        updates = tuple(_take_updates(graph))
        output = graph.output_node()
        returned: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
        output.args = ((*returned, *(update.content for update in updates)),)
        graph.eliminate_dead_code(lambda node: node.is_impure() or ops.has_effect(node))
        for node in graph.nodes:
            if node.op != "output":
                _check_node(node)
        step = StepGraph(module, 0, len(returned), updates)
        if not any(node.meta.get(SPAN) == "backward" for node in step.nodes):
            raise CaptureError(
                "the step computes no gradients: call torch.autograd.grad or loss.backward() in "
                "it; to plan a function that only computes the loss use remat.compile"
            )
        _make_readable(step)
        step = _with_owned_contents_copied(step)
        graph.lint()
        module.recompile()
        return step

    @property
    def forward_outputs(self) -> tuple[Any, ...]:
        """What the caller gets of what forward computes."""
        return tuple(node for node in self._results if self._is_forward(node))

    @property
    def backward_outputs(self) -> tuple[Any, ...]:
        """What else the caller gets."""
        return tuple(node for node in self._results if not self._is_forward(node))

    @property
    def output_descs(self) -> tuple[Any, ...]:
        """None for each output: AOTAutograd has not seen this graph."""
        return (None,) * len(self._outputs)

    @property
    def results(self) -> tuple[Any, ...]:
        """What the caller gets: nodes, numbers, None."""
        return self._outputs[: self.returned]

    @property
    def _results(self) -> tuple[fx.Node, ...]:
        return tuple(item for item in self.results if isinstance(item, fx.Node))

    def _is_forward(self, node: fx.Node) -> bool:
        return self.phases[node] == "forward"

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders, in order."""
        return tuple(node for node in self.nodes if node.op == "placeholder")

    @property
    def primals(self) -> tuple[fx.Node, ...]:
        """None: no gradient is handed to autograd."""
        return ()

    @cached_property
    def phases(self) -> dict[fx.Node, Phase]:
        """Forward up to the first backward, backward from there on."""
        begun = False
        found: dict[fx.Node, Phase] = {}
        for node in self.nodes:
            begun |= node.meta.get(SPAN, "forward") != "forward"
            outside = node.op in ("placeholder", "get_attr")
            found[node] = "backward" if begun and not outside else "forward"
        return found

    @cached_property
    def mutated_primals(self) -> frozenset[fx.Node]:
        """None: updates are placed where no reader of the old content is left."""
        return frozenset()

    @property
    def backwards(self) -> int:
        """How many backward passes were traced, one after another."""
        spans = [node.meta.get(SPAN) for node in self.nodes if node.op == "call_function"]
        return sum(key == "backward" for key, _ in itertools.groupby(spans))

    @cached_property
    def tail(self) -> frozenset[fx.Node]:
        """What was traced behind the last backward: the optimizer, mostly."""
        found: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node.meta.get(SPAN) == "backward":
                break
            found.add(node)
        return frozenset(found)


def step_storages(step: StepGraph, granularity: int, device_type: str) -> Storages:
    """The storages of a step; a number lies in those it was read out of."""
    storages = Storages.of(step, granularity, device_type)
    for node in step.nodes:
        if node.op == "call_function" and not tensors_of(node):
            read = (s for source in node.all_input_nodes for s in storages.held[source])
            storages.held[node] = tuple(dict.fromkeys(read))
    return storages


def _take_updates(graph: fx.Graph) -> list[Update]:
    """Remove the ``copy_`` at the end of the graph; they come back as updates."""
    found: list[Update] = []
    for node in list(graph.nodes):
        writes = node.op == "call_function" and node.target is _COPY
        if not (writes and node.args[0].op == "placeholder"):
            continue
        target, content = node.args[:2]
        node.replace_all_uses_with(content)
        graph.erase_node(node)
        found.append(Update(target, content))
    return found


def _check_node(node: fx.Node) -> None:
    """Refuse what no plan can hold; numbers get a value to be costed with."""
    value = node.meta.get("val")
    if ops.schema_name(node) == "aten::mkldnn_rnn_layer":
        raise CaptureError(
            "oneDNN's recurrent layers hand a workspace to their backward that no graph holds: run "
            "the step under torch.backends.mkldnn.flags(enabled=False)"
        )
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
        # What it is will be known when the step runs; a name for it would differ at every capture.
        kind = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}[type(value)]
        node.meta["val"] = kind(1)
        return
    for item in ops.parts_of(value):
        if isinstance(item, tuple | list):
            raise CaptureError(
                f"{node.target} returns lists of tensors in a tuple, which this version cannot "
                "plan: make the optimizer with foreach=False, fused=False"
            )
        sizes = item.shape if isinstance(item, torch.Tensor) else ()
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise CaptureError(
                f"{node.name} ({node.target}) has a size that depends on data, which this version "
                "cannot plan"
            )


def _make_readable(step: StepGraph) -> None:
    """Source lines of the user's, not of torch's; backward gets lines and modules of its inputs."""
    for node in step.nodes:
        if trace := node.meta.get("stack_trace"):
            node.meta["stack_trace"] = _users_frames(trace)
        if node.op != "call_function" or "nn_module_stack" in node.meta:
            continue
        if node in step.tail or node.meta.get(SPAN) != "backward":
            continue
        for source in reversed(node.all_input_nodes):
            stack = source.meta.get("nn_module_stack") or source.meta.get("fwd_nn_module_stack")
            if stack:
                node.meta["fwd_nn_module_stack"] = stack
            if "stack_trace" in source.meta:
                node.meta["stack_trace"] = source.meta["stack_trace"]
            if stack:
                break


def _users_frames(trace: str) -> str:
    """The frames outside torch; all, where there are no others."""
    starts = [found.start() for found in _FRAME.finditer(trace)]
    frames = [trace[at:end] for at, end in zip(starts, [*starts[1:], None], strict=True)]
    torchs = os.path.dirname(torch.__file__)
    own = [frame for frame in frames if torchs not in frame.split("\n")[0]]
    return "".join(own) or trace


def _with_owned_contents_copied(step: StepGraph) -> StepGraph:
    """A new content that is another input gets a copy: that input may be written before."""
    storages = Storages.of(step)
    owned = {s for node in step.inputs for s in storages.created[node]}
    updates = tuple(
        Update(update.target, _copy_of(step, update.content))
        if owned & set(storages.held[update.content])
        else update
        for update in step.updates
    )
    contents = (update.content for update in updates)
    step.output.args = ((*step.results, *contents),)
    return StepGraph(step.module, 0, step.returned, updates)


def _copy_of(step: StepGraph, content: fx.Node) -> fx.Node:
    with step.module.graph.inserting_before(step.output):
        copy = step.module.graph.call_function(torch.ops.aten.clone.default, (content,))
    value = content.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    copy.meta[SPAN] = "after"
    return copy
