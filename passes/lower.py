"""JointGraph + costs, given as plain data → Problem.

Three ops of a problem stand for no node of the joint graph:

* ``random_state``: before a random op, the state of its generator is taken, so that a second run
  can replay it. A plan that never runs the op again never reads the state, and it is not emitted.
* ``snapshot``: a primal that the step overwrites is copied before its first reader, so that a
  reader that is run again reads the old content. Not emitted where no reader is run again.
* ``epilogue``: new contents of mutated inputs live until forward's caller has copied them;
  ``accumulate``: a gradient whose layout is not its parameter's is copied when it is accumulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from remat.passes import layers, ops, runtime
from remat.passes.costs import OpCost
from remat.passes.joint import JointGraph
from remat.passes.mutation import SNAPSHOT
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.solvers.problem import Op, Phase, Problem, Value

OpKind = Literal["node", "random_state", "snapshot", "epilogue", "accumulate", "update"]


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """What an op of the problem stands for; ``node`` is the joint node it belongs to, if any."""

    kind: OpKind
    node: fx.Node | None = None


@dataclass(frozen=True)
class Lowered:
    """A problem and the way back to the joint graph.

    Attributes:
        ops: for every op of the problem, what it stands for.
        value_of: storage → value of the problem.
        random_state_of: random node → the value that holds its generator's state.
        snapshot_of: mutated primal → the value that holds its copy.
        kept: why ops may never be run again, one sentence each (unknown ops, effects).
    """

    joint: JointGraph
    storages: Storages
    problem: Problem
    ops: tuple[LoweredOp, ...]
    value_of: Mapping[int, int]
    random_state_of: Mapping[fx.Node, int]
    snapshot_of: Mapping[fx.Node, int]
    kept: tuple[str, ...]


def op_nodes(joint: JointGraph, storages: Storages) -> tuple[fx.Node, ...]:
    """The nodes that become ops: those that allocate, draw or have an effect."""
    return tuple(
        node
        for node in joint.nodes
        if node.op == "call_function"
        and (storages.created[node] or ops.has_effect(node) or ops.is_random(node))
    )


def lower(
    joint: JointGraph,
    storages: Storages,
    costs: Mapping[fx.Node, OpCost],
    *,
    fixed_bytes: int = 0,
    name: str = "",
    cost: str = "",
    replays_random: bool = True,
    same_kernels: bool = True,
) -> Lowered:
    """Make the problem of one joint graph.

    Args:
        costs: one for each of :func:`op_nodes`.
        fixed_bytes: resident bytes, alive whatever the plan.
        name, cost: texts for people.
        replays_random: whether the executor can run a random op again from its generator's state.
        same_kernels: whether what is computed again has the same bits. If not, decisions
            (:func:`remat.passes.ops.decides`) are kept.
    """
    builder = _Builder(joint, storages, costs, replays_random, same_kernels)
    builder.add_values()
    for node in op_nodes(joint, storages):
        builder.add_node(node)
    builder.add_epilogues()
    problem = Problem(tuple(builder.values), tuple(builder.rows), fixed_bytes, name, cost)
    return Lowered(
        joint,
        storages,
        problem,
        tuple(builder.ops),
        builder.value_of,
        builder.random_state_of,
        builder.snapshot_of,
        tuple(dict.fromkeys(builder.kept)),
    )


@dataclass
class _Builder:
    joint: JointGraph
    storages: Storages
    costs: Mapping[fx.Node, OpCost]
    replays_random: bool = True
    same_kernels: bool = True
    values: list[Value] = field(default_factory=list)
    rows: list[Op] = field(default_factory=list)
    ops: list[LoweredOp] = field(default_factory=list)
    value_of: dict[int, int] = field(default_factory=dict)
    random_state_of: dict[fx.Node, int] = field(default_factory=dict)
    snapshot_of: dict[fx.Node, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    epilogue_bytes: int = 0

    def __post_init__(self) -> None:
        self.layer_of = layers.layers(self.joint.nodes)
        self.mutated_storages = {
            self.storages.created[primal][0]: primal
            for primal in self.joint.mutated_primals - self.joint.written_in_backward
            if self.storages.created[primal]
        }
        self.written_in_place = {
            storage
            for node in self.joint.nodes
            for argument in ops.mutated_args(node)
            for storage in self.storages.held[argument]
        }
        self.new_contents = self._new_contents()

    def _new_contents(self) -> set[int]:
        """Storages that forward returns only for its caller to copy into a mutated input."""
        returned: set[int] = set()
        copied: set[int] = set()
        for output, desc in zip(self.joint.forward_outputs, self.joint.output_descs, strict=False):
            if isinstance(output, fx.Node):
                into = copied if private.mutated_input(desc) is not None else returned
                into.update(self.storages.held[output])
        return copied - returned

    def add_values(self) -> None:
        returned = self._storages_of(self.joint.forward_outputs) - self.new_contents
        gradients = self._storages_of(self.joint.backward_outputs)
        for storage, creator in enumerate(self.storages.creator):
            owned = creator.op == "get_attr" or private.is_primal(creator)
            output = (
                "forward" if storage in returned else "backward" if storage in gradients else None
            )
            if private.is_tangent(creator) and creator.meta["val"].numel() == 1:
                # The gradient of a loss is made, and held to the end, by whoever calls backward().
                output = "backward"
            self.value_of[storage] = len(self.values)
            self.values.append(
                Value(
                    name=self._name(storage),
                    bytes=self.storages.bytes[storage],
                    owned=owned,
                    tangent=private.is_tangent(creator),
                    output=None if owned else output,  # type: ignore[arg-type]
                    offloadable=output is None and self._is_offloadable(storage),
                )
            )

    def _is_offloadable(self, storage: int) -> bool:
        """Made in forward, and never written again: a copy taken early would hold old content."""
        creator, held = self.storages.creator[storage], self.storages.bytes[storage]
        made = creator.op == "call_function" and self.joint.phases[creator] == "forward"
        taken = isinstance(self.storages.holder[storage].meta.get("val"), torch.Tensor)
        return made and taken and held > 0 and storage not in self.written_in_place

    def _name(self, storage: int) -> str:
        holder = self.storages.holder[storage]
        created = self.storages.created[holder]
        # Outputs that nobody takes out of their tuple (statistics of a frozen norm) have no node.
        position = created.index(storage) if storage in created else 0
        return f"{holder.name}.{position}" if position else holder.name

    def _storages_of(self, outputs: Sequence[object]) -> set[int]:
        nodes = [output for output in outputs if isinstance(output, fx.Node)]
        return {storage for node in nodes for storage in self.storages.held[node]}

    def add_node(self, node: fx.Node) -> None:
        phase = self.joint.phases[node]
        reads = self._reads(node)
        why = ops.why_never_again(node)
        if why is None and not self.same_kernels and ops.decides(node):
            why = f"{node.target} decides, and might decide otherwise on values computed again"
        rerunnable = phase != "backward" and why is None and SNAPSHOT not in node.meta
        if ops.is_random(node) and not self.replays_random:
            rerunnable = False
        if self.written_in_place & {*self.storages.held[node], *self._raw_reads(node)}:
            rerunnable = False
        if why is not None and not ops.has_effect(node) and phase != "backward":
            self.kept.append(f"{node.name} is kept: {why}")
        cost = self.costs[node]
        workspace = max(0, cost.workspace - cost.retained)
        self._retain(node, cost.retained)
        if ops.is_random(node) and rerunnable:
            device = device_of(node)
            reads.append(self._add_random_state(node, device))
            workspace += runtime.random_state_bytes(device)
        if SNAPSHOT in node.meta:
            self.snapshot_of[node.meta[SNAPSHOT]] = self.value_of[self.storages.created[node][0]]
        self._add(
            LoweredOp("node", node),
            phase,
            node.name,
            reads=reads,
            writes=[self.value_of[storage] for storage in self.storages.created[node]],
            seconds=cost.seconds,
            flops=cost.flops,
            workspace=workspace,
            target=str(node.target),
            random=ops.is_random(node),
            rerunnable=rerunnable,
        )

    def _retain(self, node: fx.Node, extra: int) -> None:
        """A kernel may return its result inside a larger storage (a loss, in that of its terms)."""
        if extra and self.storages.created[node]:
            value = self.value_of[self.storages.created[node][0]]
            held = self.values[value]
            self.values[value] = dataclasses.replace(held, bytes=held.bytes + extra)

    def _raw_reads(self, node: fx.Node) -> list[int]:
        held = (
            storage for source in node.all_input_nodes for storage in self.storages.held[source]
        )
        return [s for s in dict.fromkeys(held) if s not in self.storages.created[node]]

    def _reads(self, node: fx.Node) -> list[int]:
        values = []
        for storage in self._raw_reads(node):
            primal = self.mutated_storages.get(storage)
            if primal is None or ops.has_effect(node) or SNAPSHOT in node.meta:
                values.append(self.value_of[storage])
            else:
                values.append(self._snapshot(primal, storage))
        return list(dict.fromkeys(values))

    def _snapshot(self, primal: fx.Node, storage: int) -> int:
        if primal not in self.snapshot_of:
            self.snapshot_of[primal] = len(self.values)
            name = f"{primal.name}.snapshot"
            self.values.append(Value(name, self.storages.bytes[storage], offloadable=False))
            self._add(
                LoweredOp("snapshot", primal),
                "forward",
                name,
                reads=[self.value_of[storage]],
                writes=[self.snapshot_of[primal]],
                rerunnable=False,
            )
        return self.snapshot_of[primal]

    def _add_random_state(self, node: fx.Node, device: torch.device) -> int:
        name = f"{node.name}.random_state"
        self.random_state_of[node] = len(self.values)
        self.values.append(Value(name, runtime.random_state_bytes(device), offloadable=False))
        self._add(
            LoweredOp("random_state", node),
            "forward",
            name,
            writes=[self.random_state_of[node]],
            rerunnable=False,
        )
        return self.random_state_of[node]

    def add_epilogues(self) -> None:
        copied = [self.value_of[s] for s in sorted(self.new_contents)]
        copied = [value for value in copied if not self.values[value].owned]
        if copied:
            self._add(LoweredOp("epilogue"), "forward", "epilogue", reads=copied, rerunnable=False)
        extra = _copied_gradient_bytes(self.joint)
        gradients = sorted(self._storages_of(self.joint.backward_outputs))
        read = [self.value_of[s] for s in gradients if not self.values[self.value_of[s]].owned]
        if extra and read:
            self._add(
                LoweredOp("accumulate"), "backward", "accumulate", reads=read, workspace=extra
            )

    def _add(
        self,
        what: LoweredOp,
        phase: Phase,
        name: str,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        seconds: float = 0.0,
        flops: int = 0,
        workspace: int = 0,
        target: str = "",
        random: bool = False,
        rerunnable: bool = True,
    ) -> None:
        node = what.node
        self.ops.append(what)
        self.rows.append(
            Op(
                name=name,
                phase=phase,
                reads=tuple(reads),
                writes=tuple(writes),
                seconds=seconds,
                flops=flops,
                workspace=workspace,
                target=target or what.kind,
                random=random,
                rerunnable=rerunnable,
                layer=self.layer_of.get(node, "") if node is not None else "",
                source=layers.source_line(node) if node is not None else "",
            )
        )


def device_of(node: fx.Node) -> torch.device:
    """Where the node's outputs (else its inputs) live."""
    for source in (node, *node.all_input_nodes):
        for item in ops.parts_of(source.meta.get("val")):
            if isinstance(item, torch.Tensor):
                return item.device
    return torch.device("cpu")


def _copied_gradient_bytes(joint: JointGraph) -> int:
    """Bytes of the largest gradient that autograd copies instead of taking over.

    It takes a gradient over if its strides are the parameter's and nobody else holds it.
    """
    largest, seen = 0, set()
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=False):
        if not isinstance(gradient, fx.Node):
            continue
        ours, theirs = gradient.meta["val"], primal.meta["val"]
        same = all(
            a == b
            for a, b, size in zip(ours.stride(), theirs.stride(), ours.shape, strict=True)
            if size != 1
        )
        if not same or gradient in seen:
            largest = max(largest, ours.numel() * ours.element_size())
        seen.add(gradient)
    return largest
