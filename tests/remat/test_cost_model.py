"""Costs of graphs: every op of real training steps, predicted to the byte."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat.cost.device import DeviceSpec, find_device
from remat.cost.flops import wrapped_call
from remat.cost.model import CostModel, bytes_moved, does_work
from remat.cost.profile import output_bytes
from remat.passes.allocations import Allocations
from remat.solvers.errors import InvalidOption

CPU = DeviceSpec(
    name="cpu",
    memory=2**34,
    matrix_rates=MappingProxyType({"float32": 1e11, "bfloat16": 2e11}),
    bandwidth=1e10,
    launch=1e-6,
    granularity=1,
    source="made up for tests",
    torch_device="cpu",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))


class _Convolutional(nn.Module):
    """Ordinary, strided, depthwise, pointwise and transposed convolutions; three kinds of norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.pointwise = nn.Conv2d(16, 32, 1)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(16), nn.GroupNorm(4, 32)
        self.layer_norm = nn.LayerNorm(8)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(self.batch_norm(self.stem(image)), 2)
        x = F.gelu(self.group_norm(self.pointwise(self.depthwise(x))))
        x = F.interpolate(self.up(x), scale_factor=2.0, mode="bilinear")
        x = torch.cat((x, x.flip(-1)), dim=1)[:, :8]
        return F.mse_loss(self.layer_norm(x.permute(0, 2, 3, 1)), torch.ones(2, 32, 32, 8))


class _Misreported(nn.Module):
    """The graph says that the gradient of the loss is laid out as its input; it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x)).movedim(-1, 1)
        return F.mse_loss(x, torch.ones_like(x))


class _Attention(nn.Module):
    """An embedding, attention with shared keys and dropout, a loss over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.query, self.key_value = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.key_value(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = F.dropout(h.transpose(1, 2).flatten(2), 0.1)
        weights = (h @ x.transpose(1, 2)).softmax(-1)
        logits = self.head((weights @ x)[:, tokens[0] % 24])
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=3)


def _graph(model: nn.Module, batch: Tensor) -> tuple[fx.GraphModule, list[Tensor]]:
    """Forward and backward of one step as one graph, and its real inputs."""
    parameters = dict(model.named_parameters())

    def step(*values: Tensor) -> Sequence[Tensor]:
        named = dict(zip(parameters, values, strict=True))
        return torch.autograd.grad(torch.func.functional_call(model, named, (batch,)), values)

    inputs = list(parameters.values())
    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs), inputs


class _Watched(fx.Interpreter):
    """Runs a graph on real tensors and notes the peak of every op beside the prediction."""

    def __init__(self, module: fx.GraphModule, model: CostModel) -> None:
        super().__init__(module)
        self.cost_model = model
        self.costs = model.costs(list(module.graph.nodes))
        self.seen: dict[str, tuple[int, int]] = {}
        self.held: dict[str, int] = collections.defaultdict(int)

    def run_node(self, n: fx.Node) -> Any:
        if not does_work(n) or n.target._schema.is_mutable:
            return super().run_node(n)
        super().run_node(n)  # the first run in a process makes what libraries then keep
        with Allocations() as watch:
            result = super().run_node(n)
        expected = output_bytes(wrapped_call(n))
        self.seen[n.name] = (watch.peak, expected + self.costs[n].workspace)
        if watch.final != expected:
            self.held[n.name] = watch.final - expected
        return result


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (_Convolutional, torch.randn(2, 3, 32, 32)),
        (_Attention, torch.randint(0, 50, (2, 24))),
        (_Misreported, torch.randn(2, 32, 32, 8)),
    ],
    ids=["convolutions", "attention", "misreported layout"],
)
def test_every_op_of_a_step_allocates_what_was_predicted(
    build: Callable[[], nn.Module], batch: Tensor
) -> None:
    model = CostModel(CPU)
    module, inputs = _graph(build(), batch)
    watched = _Watched(module, model)
    with torch.no_grad():
        watched.run(*inputs)
    assert len(watched.seen) >= 6
    assert {name: pair for name, pair in watched.seen.items() if pair[0] != pair[1]} == {}
    retained = {node.name: cost.retained for node, cost in watched.costs.items() if cost.retained}
    assert dict(watched.held) == retained
    assert model.unmeasured == {}
    assert max(cost.workspace for cost in watched.costs.values()) > 1000


def _single(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Node:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return next(node for node in graph.nodes if does_work(node))


def test_roofline_by_hand() -> None:
    """A product bound by arithmetic, a sum bound by bandwidth."""
    product = _single(torch.mm, torch.empty(1000, 1000), torch.empty(1000, 1000))
    cost = CostModel(CPU).costs([product])[product]
    assert cost.flops == 2 * 10**9
    assert cost.seconds == pytest.approx(2e9 / 1e11 + 1e-6)
    addition = _single(torch.add, torch.empty(1000, 1000), torch.empty(1000, 1000))
    cost = CostModel(CPU).costs([addition])[addition]
    assert (cost.flops, cost.workspace, cost.assumed) == (0, 0, False)
    assert cost.seconds == pytest.approx(3 * 4e6 / 1e10 + 1e-6)


def test_the_rate_follows_the_dtype() -> None:
    half = torch.empty(1000, 1000, dtype=torch.bfloat16)
    node = _single(torch.mm, half, half.t())
    cost = CostModel(CPU, run=False).costs([node])[node]
    assert cost.seconds == pytest.approx(2e9 / 2e11 + 1e-6)


def test_counting_flops_ignores_the_rest() -> None:
    model = CostModel(CPU, "flops", run=False)
    product = _single(torch.mm, torch.empty(100, 100), torch.empty(100, 100))
    addition = _single(torch.add, torch.empty(100, 100), torch.empty(100, 100))
    costs = model.costs([product, addition])
    assert costs[product].seconds == pytest.approx(2e6 / 1e11, rel=1e-3)
    assert 0 < costs[addition].seconds < 1e-6 * costs[product].seconds


def test_measured_seconds_are_taken_from_the_run() -> None:
    node = _single(torch.exp, torch.empty(1000))
    model = CostModel(CPU, "measured")
    cost = model.costs([node])[node]
    assert model._profiler is not None
    timed = model._profiler.profiles([node], timed=True, run=False)[node]
    assert timed is not None
    assert cost.seconds == timed.seconds


def test_views_and_placeholders_cost_nothing() -> None:
    graph = make_fx(lambda x: torch.max(x.t()[1:], 0)[0], tracing_mode="fake")(torch.empty(4, 4))
    costs = CostModel(CPU).costs(list(graph.graph.nodes))
    working = [node for node in graph.graph.nodes if costs[node].seconds > 0]
    assert [node.target for node in working] == [torch.ops.aten.max.dim]
    assert set(costs) == set(graph.graph.nodes)


def test_of_a_table_only_the_rows_read_are_moved() -> None:
    node = _single(
        lambda i, w: F.embedding(i, w), torch.zeros(10, dtype=torch.int64), torch.empty(10_000, 8)
    )
    assert bytes_moved(wrapped_call(node)) == 10 * 8 + 320 + 320


def test_an_expanded_input_is_read_once() -> None:
    node = _single(torch.exp, torch.empty(8, 1).expand(8, 100))
    written = output_bytes(wrapped_call(node))
    assert bytes_moved(wrapped_call(node)) == 8 * 4 + written


def test_on_a_described_device_workspaces_are_assumed_and_listed() -> None:
    node = _single(torch.exp, torch.empty(1000))
    model = CostModel(find_device("h100"))
    cost = model.costs([node])[node]
    assert cost.assumed
    assert cost.workspace == 0
    assert model.unmeasured == {node.name: "h100-sxm is only described, not here"}


def test_running_nothing_uses_what_was_measured_before() -> None:
    node = _single(lambda x: x * 0.5, torch.empty(100))
    planning = CostModel(CPU, run=False)
    assert planning.costs([node])[node].assumed
    assert planning.unmeasured == {node.name: "it was not run"}
    CostModel(CPU).costs([node])
    again = CostModel(CPU, run=False).costs([node])[node]
    assert (again.workspace, again.assumed) == (12, False)


def test_an_op_that_cannot_run_falls_back_on_the_roofline_and_is_listed() -> None:
    node = _single(lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0], torch.eye(8))
    model = CostModel(CPU, "measured")
    cost = model.costs([node])[node]
    assert cost.assumed
    assert cost.workspace == 0
    assert cost.seconds == CostModel(CPU, run=False).costs([node])[node].seconds
    assert "not positive-definite" in model.unmeasured[node.name]


def test_a_described_device_cannot_be_measured() -> None:
    with pytest.raises(InvalidOption, match="needs the device, and h100-sxm is only described"):
        CostModel(find_device("h100"), "measured")
    with pytest.raises(InvalidOption, match="cost mode 'exact' is not one of roofline, measured"):
        CostModel(CPU, "exact")  # type: ignore[arg-type]
