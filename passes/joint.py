"""The joint forward and backward graph of one training step, and what each node is part of."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from remat.passes import ops
from remat.passes.torch_private import partition as private
from remat.solvers.errors import CaptureError
from remat.solvers.problem import Phase


@dataclass(frozen=True)
class JointGraph:
    """A joint graph as AOTAutograd hands it over, functional but for mutable ops it had to keep.

    Attributes:
        module: the graph module; its first ``num_forward_outputs`` outputs are the forward's, the
            rest the gradients.
    """

    module: fx.GraphModule
    num_forward_outputs: int

    @staticmethod
    def make(module: fx.GraphModule, num_forward_outputs: int) -> JointGraph:
        """Drop dead code and check that every value can be planned.

        Raises:
            CaptureError: a node this version cannot plan (dynamic sizes, script objects).
        """
        module.graph.eliminate_dead_code(lambda node: node.is_impure() or ops.has_effect(node))
        module.recompile()
        for node in module.graph.nodes:
            if node.op != "output":
                _check_node(node)
        return JointGraph(module, num_forward_outputs)

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Every node but the output, in program order."""
        return tuple(node for node in self.module.graph.nodes if node.op != "output")

    @cached_property
    def output(self) -> fx.Node:
        """The output node."""
        return next(iter(reversed(self.module.graph.nodes)))

    @property
    def forward_outputs(self) -> tuple[Any, ...]:
        """What forward returns: nodes, constants or None."""
        return self._outputs[: self.num_forward_outputs]

    @property
    def backward_outputs(self) -> tuple[Any, ...]:
        """What backward returns: gradients or None, one for each primal."""
        return self._outputs[self.num_forward_outputs :]

    @cached_property
    def _outputs(self) -> tuple[Any, ...]:
        outputs: Any = self.output.args[0]
        return tuple(outputs)

    @property
    def output_descs(self) -> tuple[Any, ...]:
        """AOTAutograd's descriptor of every output (None where it gave none)."""
        return tuple(self.output.meta.get("desc") or [None] * len(self._outputs))

    @cached_property
    def primals(self) -> tuple[fx.Node, ...]:
        """Placeholders of the forward, in order."""
        return tuple(node for node in self.nodes if private.is_primal(node))

    @cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Placeholders that arrive when backward starts, in order."""
        return tuple(node for node in self.nodes if private.is_tangent(node))

    @cached_property
    def phases(self) -> dict[fx.Node, Phase]:
        """For every node: forward, deferred or backward (see :class:`remat.solvers.problem.Op`)."""
        backward = set(self.tangents)
        differentiated = private.traced_in_backward(self.nodes)
        moving = backward | self.written_in_backward
        for node in self.nodes:
            # A backward of the caller's (autograd.Function) may draw, or count, by itself.
            reads = moving if node in differentiated else backward
            acts = node in differentiated and _stays_in_its_phase(node)
            if acts or any(source in reads for source in node.all_input_nodes):
                moving.add(node)
                backward.add(node)
        forward = self._needed_by_forward(backward)
        return {
            node: "backward" if node in backward else "forward" if node in forward else "deferred"
            for node in self.nodes
        }

    def _needed_by_forward(self, backward: set[fx.Node]) -> set[fx.Node]:
        # Effects and draws of random numbers of forward happen there even if only backward reads
        # them: a draw moved behind the caller's own draws would change both. Nobody knows what an
        # unknown op does.
        pending = [node for node in self.forward_outputs if isinstance(node, fx.Node)]
        pending += [
            node for node in self.nodes if node not in backward and _stays_in_its_phase(node)
        ]
        needed: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        return needed | {node for node in self.nodes if node.op in ("placeholder", "get_attr")}

    @cached_property
    def written_in_backward(self) -> frozenset[fx.Node]:
        """Primals that a backward of the caller's writes into, and reads anew in every run."""
        written = private.traced_in_backward(self.nodes)
        targets = (arg for node in written for arg in ops.mutated_args(node))
        return frozenset(node for node in targets if node.op == "placeholder")

    @cached_property
    def mutated_primals(self) -> frozenset[fx.Node]:
        """Primals whose content the step changes, in the graph or right after forward."""
        by_desc = {
            node.meta["desc"]: node for node in self.primals if node.meta.get("desc") is not None
        }
        found = {
            by_desc[source]
            for desc in self.output_descs[: self.num_forward_outputs]
            if (source := private.mutated_input(desc)) in by_desc
        }
        for node in self.nodes:
            found.update(base for arg in ops.mutated_args(node) for base in _view_bases(arg))
        return frozenset(node for node in found if node.op == "placeholder")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of :attr:`lines`."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Targets, topology, shapes, strides, dtypes, plain arguments: how many outputs forward
        has, then an entry for each node, last the output.

        Not names, nor what constant tensors hold: no plan depends on either.
        """
        position = {node: index for index, node in enumerate(self.nodes)}
        lines = [f"forward outputs {self.num_forward_outputs}"]
        for node in (*self.nodes, self.output):
            what = node.op if node.op in ("placeholder", "get_attr", "output") else str(node.target)
            bodies = [_body(body, len(position)) for body in ops.bodies(node)]
            arguments = (
                _canonical((node.args, node.kwargs), position) if node.op != "placeholder" else ""
            )
            own = f"{what} {arguments} {_signature(node.meta.get('val'))}"
            lines.append("\n".join([*bodies, own]))
        return tuple(lines)


def _stays_in_its_phase(node: fx.Node) -> bool:
    if node.op != "call_function" or is_getitem(node):
        return False
    return ops.has_effect(node) or ops.is_random(node) or not ops.is_known(node)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of a multi-output op."""
    return node.target is operator.getitem


def _view_bases(node: fx.Node) -> set[fx.Node]:
    """The nodes a chain of views starts from."""
    bases, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current.op == "call_function" and (ops.is_view(current) or is_getitem(current)):
            pending.extend(current.all_input_nodes)
        else:
            bases.add(current)
    return bases


def _check_node(node: fx.Node) -> None:
    if node.op not in ("placeholder", "get_attr", "call_function"):
        raise CaptureError(f"the joint graph has a node of kind {node.op!r} ({node.name})")
    if node.op == "placeholder" and not (private.is_primal(node) or private.is_tangent(node)):
        raise CaptureError(
            f"the graph passes a random state or backward state in ({node.target}); turn off "
            "torch._functorch.config.functionalize_rng_ops and compiled autograd for this model"
        )
    if getattr(node.target, "__name__", "") == "with_effects":
        raise CaptureError(
            f"{node.args[1]} has an effect that torch orders by tokens, which this version cannot "
            "plan: move it out of the compiled function"
        )
    for item in ops.parts_of(node.meta.get("val")):
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"{node.name} has a dynamic size ({item}); this version plans static sizes: "
                "compile with dynamic=False, so that every size gets its own plan"
            )
        if private.is_opaque(item):
            raise CaptureError(f"{node.name} is a script object, which this version cannot plan")


def _body(body: fx.GraphModule, first: int) -> str:
    """A graph that a higher-order op calls, as one line; its nodes are counted from ``first``."""
    position = {node: first + index for index, node in enumerate(body.graph.nodes)}
    inner = (
        f"{node.target} {_canonical((node.args, node.kwargs), position)}"
        for node in body.graph.nodes
        if node.op in ("call_function", "output")
    )
    return "{" + "; ".join(inner) + "}"


def _canonical(argument: Any, position: dict[fx.Node, int]) -> str:
    if isinstance(argument, fx.Node):
        return f"%{position[argument]}"
    if isinstance(argument, tuple | list):
        return "[" + ",".join(_canonical(item, position) for item in argument) + "]"
    if isinstance(argument, dict):
        # Where a plan was made does not change what is planned.
        kept = sorted(key for key in argument if key not in ("device", "pin_memory"))
        return "{" + ",".join(f"{key}:{_canonical(argument[key], position)}" for key in kept) + "}"
    if isinstance(argument, torch.device):
        return "device"
    return repr(argument)


def _signature(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"
    if isinstance(value, tuple | list | dict):
        return "(" + ",".join(_signature(item) for item in ops.parts_of(value)) + ")"
    return repr(value)
