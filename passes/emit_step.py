"""The schedule of a whole step becomes one graph, op by op, in the schedule's order.

As in :mod:`remat.passes.split`, views are emitted where somebody reads them, and nothing is freed
in so many words: a name dies at its last use. States of generators are taken where the schedule
takes them, and dropped where nobody replays them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from remat.passes import runtime
from remat.passes.lower import Lowered, LoweredOp, device_of
from remat.passes.offload import Place
from remat.passes.split import OP_INDEX, Emitter
from remat.passes.whole_step import StepGraph
from remat.solvers.errors import RematError
from remat.solvers.schedule import Schedule

_COPY: Final = torch.ops.aten.copy_.default


def emit_step(lowered: Lowered, schedule: Schedule, place: Place | None = None) -> fx.GraphModule:
    """One graph that takes the step's inputs and returns what it returns, updates done.

    Args:
        place: where the schedule offloads to, if it does.

    Raises:
        RematError: the schedule computes something again from an input that is updated by then, or
            offloads without a place.
    """
    emitter = _Whole(lowered, place)
    emitter.run(schedule.steps)
    emitter.close()
    step = lowered.joint
    made = fx.GraphModule(step.module, emitter.graph)
    _verify_order(lowered, schedule, made)
    return made


class _Whole(Emitter):
    def __init__(self, lowered: Lowered, place: Place | None) -> None:
        super().__init__(lowered, set(), place)
        assert isinstance(lowered.joint, StepGraph)
        self.step = lowered.joint
        self.contents = {update.target: update.content for update in self.step.updates}
        self.states: dict[fx.Node, fx.Node] = {}
        self.ran: set[fx.Node] = set()
        self.updated: set[fx.Node] = set()
        for node in self.step.inputs:
            self.instances[node] = self.copy(node, {})

    def resolve(self, node: fx.Node) -> Any:
        if node in self.updated:
            raise RematError(
                f"the schedule reads {node.name} after the step has updated it; this is a defect "
                "in remat: report it with the step"
            )
        return super().resolve(node)

    def placeholder(self, node: fx.Node) -> Any:
        raise RematError(f"{node.name} is no input of the step")

    def saved_value(self, node: fx.Node) -> Any:
        raise RematError(f"the schedule reads {node.name} before it is computed")

    def call(self, node: fx.Node) -> fx.Node:
        again = node in self.ran
        self.ran.add(node)
        if not (again and node in self.states):
            return super().call(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.resolve)
        op: Any = node.target
        copy = self.graph.call_function(
            runtime.replay_random, (self.states[node], device_of(node), op, *args), kwargs
        )
        copy.meta = dict(node.meta)
        return copy

    def emit_synthetic(self, what: LoweredOp) -> None:
        assert what.node is not None
        if what.kind == "random_state":
            made = self.graph.call_function(runtime.random_state, (device_of(what.node),))
            self.states[what.node] = made
            return
        content = self.resolve(self.contents[what.node])
        copy = self.graph.call_function(_COPY, (self.instances[what.node], content))
        copy.meta["val"] = what.node.meta["val"]
        self.updated.add(what.node)

    def close(self) -> None:
        results = self.output_args(self.step.results)
        for state in self.states.values():
            if not state.users:
                self.graph.erase_node(state)
        self.add_output(results, [None] * len(results))


def _verify_order(lowered: Lowered, schedule: Schedule, made: fx.GraphModule) -> None:
    planned = [index for index in schedule.computes if lowered.ops[index].kind == "node"]
    emitted = [node.meta[OP_INDEX] for node in made.graph.nodes if OP_INDEX in node.meta]
    if planned != emitted:
        raise RematError(
            f"the schedule runs {len(planned)} ops, {len(emitted)} were emitted, or in another "
            "order; this is a defect in remat: report it with the step"
        )
