"""What stands in the way of a recording is found, named and placed, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.passes import runtime
from remat.passes.capture_safe import Obstacle, capture_safe, refuse_obstacles
from remat.solvers.errors import CaptureError


def traced(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """``function`` on fake tensors; sizes and numbers that depend on data get names."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, Tensor) else a for a in args]
    return make_fx(function, tracing_mode="fake", _error_on_data_dependent_ops=False)(*fakes)


def kinds(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    return [found.kind for found in capture_safe(traced(function, *args), **options)]


def on_cpu(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Obstacle, ...]:
    """As for a graph that stands on the CPU for one on a GPU."""
    return capture_safe(traced(function, *args), device_type="cpu", **options)


def test_a_step_on_two_devices_cannot_be_recorded() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        here, there = (torch.empty(4, device=f"cuda:{index}") for index in range(2))
    first, second = graph.placeholder("first"), graph.placeholder("second")
    first.meta["val"], second.meta["val"] = here, there
    total = graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
    total.meta["val"] = here
    moved = graph.call_function(torch.ops.aten.add.Tensor, (second, 1.0))
    moved.meta["val"] = there
    graph.output((total, moved))
    found = capture_safe(fx.GraphModule({}, graph))
    assert [(o.kind, o.node) for o in found] == [("device", "second"), ("device", "add_tensor")]
    assert "lies on cuda:1, and what comes before on cuda:0" in str(found[0])


def test_a_training_step_can_be_recorded() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.GELU())

    def step(x: Tensor, *weights: Tensor) -> Any:
        names = [name for name, _ in net.named_parameters()]
        loss = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), x).sum()
        return torch.autograd.grad(loss, weights)

    weights = [p.detach().requires_grad_() for p in net.parameters()]
    assert on_cpu(step, torch.randn(4, 8), *weights) == ()


@pytest.mark.parametrize(
    ("function", "kind", "why"),
    [
        (lambda x: x * x.sum().item(), "host sync", "reads a number"),
        (lambda x: x[x > 0].sum(), "host sync", "indexes by a mask"),
        (lambda x: torch.index_put(x, (x > 0,), x.sum()), "host sync", "indexes by a mask"),
        (lambda x: torch.nonzero(x).sum(), "dynamic shape", "size depends on data"),
        (lambda x: torch.masked_select(x, x > 0).sum(), "dynamic shape", "size depends on data"),
        (lambda x: torch.unique(x).sum(), "dynamic shape", "size depends on data"),
    ],
)
def test_what_waits_for_the_device(function: Callable[..., Any], kind: str, why: str) -> None:
    first, *_ = on_cpu(function, torch.randn(8))
    assert first.kind == kind
    assert why in first.why


def test_indices_that_are_numbers_are_fine() -> None:
    assert on_cpu(lambda x, i: x[i], torch.randn(8), torch.tensor([1, 2])) == ()
    assert (
        on_cpu(lambda x, i: torch.index_put(x, (i,), x[i]), torch.randn(8), torch.tensor([1])) == ()
    )


def test_deterministic_algorithms_wait() -> None:
    def step(x: Tensor, i: Tensor) -> Tensor:
        return x.scatter_add(0, i, x)

    given = torch.randn(3), torch.tensor([1, 2, 0])
    assert on_cpu(step, *given, deterministic=False) == ()
    (found,) = on_cpu(step, *given, deterministic=True)
    assert "under deterministic algorithms" in str(found)


def test_work_and_numbers_on_the_host() -> None:
    """The graph is meant for a GPU, and these tensors stand on the CPU."""
    assert kinds(lambda x: x + 1, torch.randn(3)) == ["host", "host"]
    (number, *_) = capture_safe(traced(lambda step: step + 1, torch.tensor(1.0)))
    assert number.why == "is a number on the cpu"
    assert "capturable=True" in number.advice


def test_a_mixture_of_devices() -> None:
    graph = fx.Graph()
    mode = FakeTensorMode()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(3, device="meta")
    host = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"device": "cpu"})
    back = graph.call_function(torch.ops.aten._to_copy.default, (host,), {"device": "meta"})
    with mode:
        host.meta["val"], back.meta["val"] = torch.empty(3), torch.empty(3, device="meta")
    graph.output((back,))
    found = capture_safe(fx.GraphModule({}, graph))
    assert [(o.node, o.why) for o in found] == [
        (host.name, "makes a tensor on the cpu"),
        (back.name, "copies from host memory, which is read once only"),
    ]


def test_generators_that_nobody_registers() -> None:
    generator = torch.Generator()
    root = nn.Module()
    root.generator = generator
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3)
        op = torch.ops.aten.bernoulli.default
        drawn = graph.call_function(
            op, (x,), {"generator": graph.create_node("get_attr", "generator")}
        )
        drawn.meta["val"] = torch.empty(3)
    graph.output((drawn,))
    module = fx.GraphModule(root, graph)
    (found,) = capture_safe(module, device_type="cpu")
    assert (found.kind, found.node) == ("random", drawn.name)
    assert capture_safe(module, device_type="cpu", generators=[generator]) == ()
    assert on_cpu(lambda x: torch.bernoulli(x), torch.rand(3)) == ()


def test_states_that_are_replayed_from_the_host() -> None:
    graph = fx.Graph()
    state = graph.call_function(runtime.random_state, (torch.device("cpu"),))
    graph.output((state,))
    (found,) = capture_safe(fx.GraphModule({}, graph), device_type="cpu")
    assert found.kind == "random"


def test_dynamic_sizes() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.randn(4, 4), static_shapes=False)
    module = make_fx(lambda x: x.sum(), tracing_mode="symbolic")(torch.randn(4, 4))
    found = capture_safe(module, device_type="cpu")
    assert {o.kind for o in found} == {"dynamic shape"}
    assert x.ndim == 2


def test_branches_are_chosen_on_the_host() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    (found,) = on_cpu(step, torch.randn(3))
    assert "chooses on the host" in found.why


def test_the_refusal_names_what_and_where() -> None:
    refuse_obstacles(())
    one = Obstacle("host sync", "item", "aten.item", "layers.0", "m.py:3 in forward", "reads", "do")
    with pytest.raises(CaptureError) as error:
        refuse_obstacles((one,) * 12)
    text = str(error.value)
    assert "host sync: aten.item (layers.0, m.py:3 in forward) reads; do" in text
    assert "and 2 more" in text
