"""A schedule becomes two graphs: forward and backward, in the schedule's order, step by step.

Ops are emitted exactly where the schedule computes them, as often as it does. Views are not ops:
each is emitted where somebody reads it, over the instance of its base that is alive there. A
getitem follows its op at once, because a late one keeps the whole tuple alive. Nothing is freed in
so many words: a name dies at its last use, which is where the schedule frees the value.

Backward is emitted first: what it has to be given is what forward saves.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from remat.passes import offload, ops, runtime
from remat.passes.joint import is_getitem
from remat.passes.lower import Lowered, LoweredOp, device_of
from remat.passes.mutation import SNAPSHOT, copied
from remat.passes.offload import Place
from remat.passes.torch_private import partition as private
from remat.solvers.errors import RematError
from remat.solvers.schedule import Schedule, Step

SavedKind = Literal["node", "random_state", "snapshot", "token"]
OP_INDEX = "remat_op"
"""Metadata of an emitted op: its index in the problem."""

Saved = tuple[fx.Node, SavedKind]
"""A node of the joint graph and what is saved of it: its value, its random state, a copy of it, or
the token of what was offloaded."""


def split(
    lowered: Lowered, schedule: Schedule, place: Place | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Emit forward and backward as AOTAutograd wants them.

    Forward returns its outputs, then the saved tensors; backward takes the saved tensors in the
    same order, then the tangents.

    Args:
        place: where the schedule offloads to, if it does.

    Raises:
        RematError: the schedule reads what it has not kept, or offloads without a place.
    """
    boundary = schedule.boundary(lowered.problem)
    backward = _Backward(lowered, alive_after(lowered, schedule, boundary), place)
    backward.run(schedule.steps[boundary:])
    backward.close()
    saved = backward.saved_in_order()
    forward = _Forward(lowered, saved, place)
    forward.run(schedule.steps[:boundary])
    forward.close()
    root = lowered.joint.module
    return fx.GraphModule(root, forward.graph), fx.GraphModule(root, backward.graph)


def alive_after(lowered: Lowered, schedule: Schedule, position: int) -> set[int]:
    """The values alive before the step at ``position``, tangents and owned ones not counted."""
    alive: set[int] = set()
    for step in schedule.steps[:position]:
        if step.kind == "compute":
            alive.update(lowered.problem.ops[step.index].writes)
        elif step.kind == "reload":
            alive.add(step.index)
        elif step.kind == "free":
            alive.discard(step.index)
    return alive


class Emitter:
    """Common to all emitted graphs: instances of values, and views over them."""

    def __init__(self, lowered: Lowered, alive: set[int], place: Place | None = None) -> None:
        self.lowered = lowered
        self.graph = fx.Graph()
        self.transfers = offload.Emitter(self.graph, place)
        self.holders = offload.holders(lowered)
        self.instances: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[fx.Node, tuple[fx.Node, ...], int], fx.Node] = {}
        self.alive = alive
        self.reader = -1

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if step.kind == "compute":
                self._compute(step.index)
            elif step.kind == "free":
                self.alive.discard(step.index)
            elif step.kind == "offload":
                self.offload(step.index)
            elif step.kind == "reload":
                holder = self.holders[step.index]
                made = self.transfers.reload(step.index, self.token(step.index), holder)
                self.instances[holder] = made
                self.alive.add(step.index)
            else:
                instance = self.resolve(self.holders[step.index])
                self.transfers.wait(step.index, self.token(step.index), instance)

    def offload(self, value: int) -> fx.Node:
        """Emit the start of a copy; answers the token."""
        return self.transfers.offload(value, self.resolve(self.holders[value]))

    def token(self, value: int) -> fx.Node:
        """The token of a value that was offloaded."""
        if value not in self.transfers.tokens:
            name = self.lowered.problem.values[value].name
            raise RematError(f"the schedule waits for {name}, which it has not offloaded")
        return self.transfers.tokens[value]

    def _compute(self, index: int) -> None:
        what = self.lowered.ops[index]
        # Another one for each time an op runs: see _view.
        self.reader += 1
        if what.kind == "node":
            assert what.node is not None
            self._emit(what.node, index)
        else:
            self.emit_synthetic(what)
        self.alive.update(self.lowered.problem.ops[index].writes)

    def _emit(self, node: fx.Node, index: int) -> None:
        copy = self.call(node)
        copy.meta[OP_INDEX] = index
        if isinstance(node.meta.get("val"), tuple | list | dict):
            getitems = [user for user in node.users if is_getitem(user)]
            for user in getitems:
                if not self._is_alive(user):
                    self.instances[user] = self.copy(user, {node: copy})
            if len(getitems) < len(node.users):
                self.instances[node] = copy
        else:
            self.instances[node] = copy

    def _is_alive(self, node: fx.Node) -> bool:
        # A second instance of a value that is still alive is not taken out of its tuple.
        storages = self.lowered.storages
        values = [self.lowered.value_of[storage] for storage in storages.held[node]]
        return bool(values) and all(value in self.alive for value in values)

    def call(self, node: fx.Node) -> fx.Node:
        """Emit the node's op over the current instances of its inputs."""
        return self.copy(node, {source: self.resolve(source) for source in node.all_input_nodes})

    def copy(self, node: fx.Node, inputs: dict[fx.Node, Any]) -> fx.Node:
        copy = self.graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, lambda source: inputs[source]),
            fx.map_arg(node.kwargs, lambda source: inputs[source]),
            name=node.name,
        )
        copy.meta = dict(node.meta)
        return copy

    def resolve(self, node: fx.Node) -> Any:
        """The node (or constant) of the new graph that stands for ``node`` here and now."""
        if node in self.instances:
            return self.instances[node]
        if node.op == "placeholder":
            return self.placeholder(node)
        if node.op == "get_attr":
            self.instances[node] = self.copy(node, {})
            return self.instances[node]
        if is_getitem(node) and not isinstance(node.meta["val"], torch.Tensor):
            return node.meta["val"]
        if self.lowered.storages.is_alias(node) and not self._is_output_of_op(node):
            return self._view(node)
        return self.saved_value(node)

    def _is_output_of_op(self, node: fx.Node) -> bool:
        return is_getitem(node) and bool(self.lowered.storages.created[node.args[0]])  # type: ignore[index]

    def _view(self, node: fx.Node) -> fx.Node:
        if not (is_getitem(node) or ops.is_known(node)):
            raise RematError(
                f"{node.name} ({node.target}) returns memory of its inputs, and remat does not "
                "know whether it may be run again: return a copy in the operator"
            )
        if any(True for _ in ops.mutated_args(node)):
            raise RematError(
                f"backward reads {node.name}, which {node.target} wrote in place in forward; "
                "this version cannot save it. Write out of place in the model"
            )
        inputs = {source: self.resolve(source) for source in node.all_input_nodes}
        # Each reader has its own copy of what is inlined into it: one copy with readers far apart
        # would be stored from the first to the last.
        reader = self.reader if self._is_inlined(node) else -1
        key = (node, tuple(v for v in inputs.values() if isinstance(v, fx.Node)), reader)
        if key not in self.views:
            self.views[key] = self.copy(node, inputs)
        return self.views[key]

    def _is_inlined(self, node: fx.Node) -> bool:
        return node in self.lowered.storages.inlined

    def output_args(self, outputs: tuple[Any, ...]) -> list[Any]:
        return [self.resolve(item) if isinstance(item, fx.Node) else item for item in outputs]

    def add_output(self, outputs: list[Any], descs: list[Any]) -> None:
        self.graph.output(tuple(outputs)).meta["desc"] = descs
        for node in reversed(self.graph.nodes):
            passive = is_getitem(node) or ops.is_view(node) or node.op == "get_attr"
            if passive and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()

    def placeholder(self, node: fx.Node) -> Any:
        raise NotImplementedError

    def saved_value(self, node: fx.Node) -> Any:
        raise NotImplementedError

    def emit_synthetic(self, what: LoweredOp) -> None:
        raise NotImplementedError


class _Forward(Emitter):
    def __init__(self, lowered: Lowered, saved: list[Saved], place: Place | None) -> None:
        super().__init__(lowered, set(), place)
        self.saved = saved
        self.made: dict[Saved, fx.Node] = {}
        for primal in lowered.joint.primals:
            self.instances[primal] = self.copy(primal, {})

    def offload(self, value: int) -> fx.Node:
        """The same, and the token can be saved."""
        token = super().offload(value)
        self.made[self.holders[value], "token"] = token
        return token

    def placeholder(self, node: fx.Node) -> Any:
        raise RematError(f"forward reads {node.name}, which arrives when backward starts")

    def saved_value(self, node: fx.Node) -> Any:
        raise RematError(f"the schedule reads {node.name} in forward before it is computed")

    def emit_synthetic(self, what: LoweredOp) -> None:
        """States and copies are taken only where backward was seen to need them."""
        if what.node is None or (what.node, what.kind) not in self.saved:
            return
        if what.kind == "snapshot":
            source = self.instances[what.node]
            made = copied(self.graph, source, what.node.meta["val"])[1]
        else:
            made = self.graph.call_function(runtime.random_state, (device_of(what.node),))
        made.meta["val"] = _saved_fake(what.node, what.kind)
        self.made[what.node, what.kind] = made  # type: ignore[index]

    def close(self) -> None:
        joint = self.lowered.joint
        outputs = self.output_args(joint.forward_outputs)
        saved = [
            self.resolve(n) if kind == "node" else self.made[n, kind] for n, kind in self.saved
        ]
        descs = list(joint.output_descs[: joint.num_forward_outputs])
        descs += [
            private.saved_desc(index, _is_version_checked(node))
            for index, (node, _) in enumerate(self.saved)
        ]
        self.add_output(outputs + saved, descs)


class _Backward(Emitter):
    def __init__(self, lowered: Lowered, alive: set[int], place: Place | None = None) -> None:
        super().__init__(lowered, alive, place)
        self.given: dict[Saved, fx.Node] = {}
        self.tangents: dict[fx.Node, fx.Node] = {}
        clones = (what.node for what in lowered.ops if what.node is not None)
        self.clones = {node.meta[SNAPSHOT]: node for node in clones if SNAPSHOT in node.meta}

    def token(self, value: int) -> fx.Node:
        """The same; what was offloaded in forward comes from there."""
        tokens = self.transfers.tokens
        return tokens.get(value) or self._given(self.holders[value], "token")

    def placeholder(self, node: fx.Node) -> Any:
        if private.is_tangent(node):
            if node not in self.tangents:
                self.tangents[node] = self._take(node.name, node.meta)
            return self.tangents[node]
        if node in self.clones:
            return self.resolve(self.clones[node])
        return self._given(node, "snapshot" if node in self.lowered.snapshot_of else "node")

    def saved_value(self, node: fx.Node) -> Any:
        for storage in self.lowered.storages.held[node]:
            if self.lowered.value_of[storage] not in self.alive:
                raise RematError(f"the schedule reads {node.name} in backward after it was freed")
        return self._given(node, "node")

    def _given(self, node: fx.Node, kind: SavedKind) -> fx.Node:
        if (node, kind) not in self.given:
            name = node.name if kind == "node" else f"{node.name}_{kind}"
            meta = dict(node.meta) if kind == "node" else {"val": _saved_fake(node, kind)}
            self.given[node, kind] = self._take(name, meta)
        return self.given[node, kind]

    def _take(self, name: str, meta: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before():
            taken = self.graph.placeholder(name)
        # Where the name is taken (a getitem that was emitted again), torch would generate
        # `new_name = name`, and the argument's own name would hold the tensor to the very end.
        taken.target = taken.name
        taken.meta = dict(meta)
        return taken

    def call(self, node: fx.Node) -> fx.Node:
        if node not in self.lowered.random_state_of:
            return super().call(node)
        inputs = {source: self.resolve(source) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: inputs[source])
        state = self._given(node, "random_state")
        op: Any = node.target
        copy = self.graph.call_function(
            runtime.replay_random, (state, device_of(node), op, *args), kwargs
        )
        copy.meta = dict(node.meta)
        return copy

    def emit_synthetic(self, what: LoweredOp) -> None:
        """Nothing to do: an ``accumulate`` happens after the graph has returned."""

    def saved_in_order(self) -> list[Saved]:
        """Version-checked tensors first, as AOTAutograd slices them."""
        return sorted(self.given, key=lambda saved: not _is_version_checked(saved[0]))

    def close(self) -> None:
        joint = self.lowered.joint
        outputs = self.output_args(joint.backward_outputs)
        for tangent in joint.tangents:
            self.placeholder(tangent)
        order = [self.given[saved] for saved in self.saved_in_order()]
        order += [self.tangents[tangent] for tangent in joint.tangents]
        for node in reversed(order):
            next(iter(self.graph.nodes)).prepend(node)
        self.add_output(outputs, list(joint.output_descs[joint.num_forward_outputs :]))


def _is_version_checked(node: fx.Node) -> bool:
    return not node.meta.get(private.NO_VERSION_CHECK, False)


def _saved_fake(node: fx.Node, kind: str) -> torch.Tensor:
    """The fake value of a token, of a random state, or of a copy of a primal."""
    if kind == "token":
        return offload.token_fake(node)
    example = ops.parts_of(node.meta["val"])[0]
    with example.fake_mode:
        if kind == "snapshot":
            return torch.empty_strided(
                example.shape, example.stride(), dtype=example.dtype, device=example.device
            )
        return torch.empty(runtime.random_state_bytes(example.device), dtype=torch.uint8)
