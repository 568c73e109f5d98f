"""FLOPs of graphs: equal to torch's counter where it can see, and by hand where it cannot."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from remat.cost.flops import graph_flops, node_flops

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
B, H, S, D = 2, 3, 16, 8
PRODUCT = 2 * B * H * S * S * D  # one product of S x D and D x S matrices in every head


def _step_flops(function: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Of forward and backward of ``function`` in one graph."""

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*values).sum(), values)

    return graph_flops(make_fx(step, tracing_mode="fake")(*inputs))


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.transposed = nn.ConvTranspose2d(8, 4, 2)
        self.linear = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.transposed(self.grouped(self.convolution(image)).relu())
        x = x.flatten(2)[..., :16]
        return self.linear(x) @ self.linear(x).transpose(1, 2)


def test_a_graph_counts_what_torch_counts() -> None:
    model, image = _Mixed(), torch.randn(2, 3, 16, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(image).sum().backward()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def call(image: Tensor, *values: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), (image,))

    assert counter.get_total_flops() > 0
    assert _step_flops(call, image, *parameters) == counter.get_total_flops()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_on_the_cpu(is_causal: bool) -> None:
    """Two products forward; backward repeats the scores and adds four."""
    q, k, v = (torch.randn(B, H, S, D, requires_grad=True) for _ in range(3))
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: E731
    assert _step_flops(function, q, k, v) == (2 + 5) * PRODUCT


def _wrapped(wrap: str) -> fx.GraphModule:
    graph = fx.Graph()
    q = graph.placeholder("q")
    q.meta["val"] = torch.empty(B, H, S, D, device="meta")
    if wrap == "save":
        node = graph.call_function(run_and_save_rng_state, (attention, q, q, q))
    else:
        state = graph.placeholder("state")
        state.meta["val"] = torch.empty(5056, dtype=torch.uint8, device="meta")
        node = graph.call_function(run_with_rng_state, (state, attention, q, q, q, 0.1))
    graph.output(graph.call_function(operator.getitem, (node, 1)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("wrap", ["save", "replay"])
def test_ops_inside_random_state_wrappers_count(wrap: str) -> None:
    assert graph_flops(_wrapped(wrap)) == 2 * PRODUCT


def test_a_convolution_inside_a_wrapper_knows_its_output() -> None:
    """The formula of convolutions needs the output's shape; a wrapper returns (state, output)."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = torch.empty(2, 3, 8, 8, device="meta")
    w.meta["val"] = torch.empty(4, 3, 3, 3, device="meta")
    arguments = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    target = torch.ops.aten.convolution.default
    node = graph.call_function(run_and_save_rng_state, (target, *arguments))
    node.meta["val"] = (torch.empty(16, dtype=torch.uint8), torch.empty(2, 4, 6, 6, device="meta"))
    assert node_flops(node) == 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3


def test_subgraphs_count() -> None:
    inner = make_fx(lambda a: a @ a)(torch.empty(8, 8))
    for node in inner.graph.nodes:
        node.meta["val"] = torch.empty(8, 8, device="meta")
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 8, device="meta")
    body = graph.get_attr("body")
    invoke = torch.ops.higher_order.invoke_subgraph
    graph.output(graph.call_function(invoke, (body, "body", x)))
    assert graph_flops(fx.GraphModule({"body": inner}, graph)) == 2 * 8**3


def test_integer_and_grouped_products() -> None:
    def flops(target: Any, *shapes: tuple[int, ...]) -> int:
        graph = fx.Graph()
        nodes = []
        for index, shape in enumerate(shapes):
            nodes.append(graph.placeholder(f"x{index}"))
            nodes[-1].meta["val"] = torch.empty(shape, device="meta")
        return node_flops(graph.call_function(target, tuple(nodes)))

    assert flops(torch.ops.aten._int_mm.default, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    grouped = torch.ops.aten._grouped_mm.default
    assert flops(grouped, (12, 5), (4, 5, 7)) == 2 * 12 * 5 * 7
    assert flops(grouped, (3, 12), (12, 7)) == 2 * 3 * 12 * 7
    assert flops(grouped, (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7


def test_pointwise_work_and_views_count_nothing() -> None:
    graph = make_fx(lambda a: (a.t() + 1).exp().sum())(torch.empty(4, 4))
    assert graph_flops(graph) == 0
    assert all(node_flops(node) == 0 for node in graph.graph.nodes)
