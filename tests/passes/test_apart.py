"""Products stay where the plan has them, whatever is added to them later."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat.passes.apart import hold_products


def traced(function: object, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function)(*inputs)  # type: ignore[arg-type]


def far(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    first = a @ b
    second = b @ c
    return torch.ops.aten.add.Tensor(first, second @ a)


def near(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.ops.aten.add.Tensor(a @ b, c)


def test_a_product_added_after_another_product_is_held() -> None:
    inputs = [torch.randn(4, 4) for _ in range(3)]
    graph = traced(far, *inputs)
    expected = graph(*inputs)
    assert hold_products(graph.graph) == 1
    graph.recompile()
    graph.graph.lint()
    assert torch.equal(graph(*inputs), expected)
    (add,) = [node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert {node.target for node in add.all_input_nodes} == {
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.mm.default,
    }


def test_a_product_added_at_once_is_left_to_the_compiler() -> None:
    inputs = [torch.randn(4, 4) for _ in range(3)]
    graph = traced(near, *inputs)
    assert hold_products(graph.graph) == 0
