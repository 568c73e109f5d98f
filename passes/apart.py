"""Keep a fusing compiler from moving ops of an emitted graph away from where the plan has them.

Inductor turns ``mm(a, b) + c`` into ``addmm(c, a, b)`` at the place of the addition. Where the
addition comes much later (the gradient of a tied weight is summed at the very end of backward),
``a`` and ``b`` would be held until then: for a language model, the gradient of the logits.
"""

from __future__ import annotations

import torch
from torch import fx

from remat.passes import ops

_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})


def hold_products(graph: fx.Graph) -> int:
    """Keep products whose sum comes after another product where they are; returns how many.

    The product is multiplied by one, which changes no number and costs nothing inside the kernel
    that adds, and the pattern that merges the two no longer sees a product there.
    """
    held, products = 0, 0
    made_at: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if ops.schema_name(node) in _PRODUCTS:
            products += 1
            made_at[node] = products
        elif node.target is torch.ops.aten.add.Tensor:
            for source in node.all_input_nodes:
                if made_at.get(_base(source), products) < products:
                    _multiply_by_one(graph, source, node)
                    held += 1
    return held


def _multiply_by_one(graph: fx.Graph, source: fx.Node, reader: fx.Node) -> None:
    with graph.inserting_before(reader):
        same = graph.call_function(torch.ops.aten.mul.Tensor, (source, 1))
    same.meta = {"val": source.meta["val"]}
    reader.replace_input_with(source, same)


def _base(node: fx.Node) -> fx.Node:
    while ops.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
