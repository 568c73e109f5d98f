"""What the ops of a graph cost where a compiler fuses them.

A library call costs what it costs by itself. A generated op costs the bytes it moves: what it
writes, and what no other op of its kernel has read or written before; the ops inlined into it cost
arithmetic only, which for a recomputed chain inside a backward kernel is next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import fx

from remat.cost.device import DeviceSpec
from remat.cost.model import TIE_BREAK, CostModel
from remat.passes.costs import OpCost
from remat.passes.fusion import Fusion
from remat.passes.ops import schema_name
from remat.passes.storages import tensors_of

# Operations an element takes beside its loads and stores: what sleef and Philox need.
_HEAVY: Final = {
    "aten::exp": 20, "aten::tanh": 30, "aten::erf": 30, "aten::sigmoid": 25, "aten::log": 20,
    "aten::pow": 10, "aten::sin": 30, "aten::cos": 30, "aten::log1p": 25, "aten::expm1": 25,
    "prims::inductor_random": 300, "prims::inductor_randint": 300,
}  # fmt: skip
_LIGHT: Final = 1


def fused_costs(
    nodes: Sequence[fx.Node], fusion: Fusion, model: CostModel
) -> dict[fx.Node, OpCost]:
    """The cost of each node that is stored, or has an effect."""
    calls = [node for node in nodes if node not in fusion.kernel]
    costs = model.costs(calls)
    touched: dict[int, dict[fx.Node, int]] = {}
    for node in nodes:
        if node in fusion.kernel:
            kernel = touched.setdefault(fusion.kernel[node], {})
            first = not kernel
            seconds = _moving(node, fusion.reads[node], kernel, model.device)
            seconds += _computing(fusion.operations[node], model.device)
            if model.mode == "flops":
                seconds *= TIE_BREAK
            elif first:
                seconds += model.device.launch
            costs[node] = OpCost(seconds=seconds)
    return {node: costs[node] for node in nodes}


def _moving(
    node: fx.Node, reads: Mapping[fx.Node, int], kernel: dict[fx.Node, int], device: DeviceSpec
) -> float:
    """Seconds to move what the kernel has not touched yet; remembers what it touches."""
    moved = written = _bytes(node)
    for creator, size in reads.items():
        moved += max(0, size - kernel.get(creator, 0))
        kernel[creator] = max(size, kernel.get(creator, 0))
    kernel[node] = written
    return moved / device.bandwidth


def _computing(operations: Sequence[fx.Node], device: DeviceSpec) -> float:
    count = sum(
        sum(t.numel() for t in tensors_of(node)) * _HEAVY.get(schema_name(node), _LIGHT)
        for node in operations
    )
    return count / device.matrix_rate(torch.float32)


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))
