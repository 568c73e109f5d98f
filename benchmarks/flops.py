"""Floating point operations of a step, counted by torch and not by remat.

torch 2.13 has no formula for the CPU's flash attention, and a walk over a graph does not see an op
inside ``run_and_save_rng_state``: both are filled in here, or recomputed attention would be free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flash_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _flash_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


def register_missing_formulas() -> None:
    """Add the CPU's flash attention to torch's registry, where it is missing."""
    for op, formula in ((_FLASH, _flash_flops), (_FLASH_BACKWARD, _flash_backward_flops)):
        if op not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(op)(formula)


def count(function: Callable[[], object]) -> int:
    """FLOPs of one call whose ops reach the dispatcher; not for a frame Dynamo compiles."""
    register_missing_formulas()
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


class GraphFlops:
    """Adds up the FLOPs of the graphs it is shown: a forward and a backward graph a step."""

    def __init__(self) -> None:
        register_missing_formulas()
        self.graphs = 0
        self.flops = 0

    def add(self, graph: GraphModule) -> None:
        """Count one graph."""
        self.graphs += 1
        self.flops += sum(node_flops(node) for node in graph.graph.nodes)


def node_flops(node: Node) -> int:
    """FLOPs of one node of an ATen graph, an op that a random-state wrapper holds included."""
    if node.op != "call_function":
        return 0
    target, args, result = node.target, tuple(node.args), node.meta.get("val")
    if target is torch.ops.higher_order.run_and_save_rng_state:
        target, args, result = args[0], args[1:], result and result[1]
    elif target is torch.ops.higher_order.run_with_rng_state:
        target, args = args[1], args[2:]
    formula = flop_counter.flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0
    values = map_arg((args, node.kwargs), lambda argument: argument.meta["val"])
    return int(formula(*values[0], **values[1], out_val=result))


def counting(
    compiler: Callable[[GraphModule, Sequence[Tensor]], Any], flops: GraphFlops
) -> Callable[[GraphModule, Sequence[Tensor]], Any]:
    """``compiler``, with every graph it is given counted first."""

    def count_and_compile(graph: GraphModule, inputs: Sequence[Tensor]) -> Any:
        flops.add(graph)
        return compiler(graph, inputs)

    return count_and_compile
