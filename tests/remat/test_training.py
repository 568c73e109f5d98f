"""Whatever a training loop may do gives the numbers of the plain model, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import CaptureError
from tests.models.steps import differences

BUDGETS = (0.5, 0.0)
Body = Callable[[nn.Module, Callable[..., Any], dict[str, Tensor]], None]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.norm(x))) + x
        return x


def check(model: nn.Module, body: Body) -> list[remat.Plan]:
    """Run ``body`` with the plain model and with compiled copies of it; compare all they leave.

    ``body(model, run, outcome)`` trains ``model`` by calling ``run`` and may add to ``outcome``.
    """
    plain = outcome_of(copy.deepcopy(model), None, body)[0]
    plans: list[remat.Plan] = []
    for budget in BUDGETS:
        outcome, found = outcome_of(copy.deepcopy(model), {"memory_budget": budget}, body)
        assert differences(plain, outcome) == [], f"memory_budget={budget}"
        plans += found
    return plans


def outcome_of(
    model: nn.Module, options: dict[str, Any] | None, body: Body
) -> tuple[dict[str, Tensor], list[Any]]:
    compiled = None if options is None else remat.compile(model, time_limit=0.3, **options)
    outcome: dict[str, Tensor] = {}
    torch.manual_seed(3)
    body(model, compiled or model, outcome)
    outcome["rng"] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            outcome[f"gradient/{name}"] = parameter.grad.clone()
    outcome |= {f"buffer/{name}": buffer.clone() for name, buffer in model.named_buffers()}
    return outcome, [] if compiled is None else list(compiled.plans)


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (64, 32)), generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:not planned. backward.retain_graph=True")
def test_backward_twice_through_one_forward() -> None:
    def body(model: nn.Module, run: Callable[..., Any], outcome: dict[str, Tensor]) -> None:
        y = run(batch(1))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()

    check(Net(), body)


def test_a_frozen_norm_whose_statistics_nobody_reads() -> None:
    def body(model: nn.Module, run: Callable[..., Any], outcome: dict[str, Tensor]) -> None:
        run(batch(1)).square().sum().backward()

    net = Net()
    net.norm.requires_grad_(False)
    net.layers[0].requires_grad_(False)
    check(net, body)


def test_an_assertion_inside_the_graph() -> None:
    class Asserting(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._assert_async((y.detach().abs() < 1e6).all(), "too large")
            return y.square().mean()

    def body(model: nn.Module, run: Callable[..., Any], outcome: dict[str, Tensor]) -> None:
        run(batch(1)).backward()

    net = Asserting()
    plan = check(net, body)[-1]
    assert any("_assert_async" in op.target for op in plan.problem.ops)
    assert not any("_assert_async" in note for note in plan.notes)
    with pytest.raises(RuntimeError, match="too large"):
        remat.compile(net, memory_budget=0.0, time_limit=0.3)(batch(1) * 1e7)


class BreaksInLoop(Net):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x
            if index == 1:
                print("in a loop")
        return x


def backward_hook() -> nn.Module:
    net = Net()
    net.layers[1].register_full_backward_hook(lambda module, given, got: None)
    return net


# Dynamo looks at the gradient of what it goes on with after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("build", [BreaksInLoop, backward_hook])
def test_a_break_that_leaves_no_trace_in_a_graph_trains_like_the_plain_model(
    build: Callable[[], nn.Module],
) -> None:
    net = build()
    plain = copy.deepcopy(net)
    run = remat.compile(net, memory_budget=0.5, time_limit=0.3, on_unplanned="ignore")
    for seed in range(3):
        run(batch(seed)).sum().backward()
        plain(batch(seed)).sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    with pytest.raises(CaptureError, match=r"\.py:\d+ `.*` breaks it"):
        remat.plan(net, (batch(1),), loss=torch.sum, memory_budget=0.5, time_limit=0.3)
    with torch.no_grad():
        assert torch.equal(run(batch(1)), net(batch(1)))


def test_a_copy_trains_itself() -> None:
    net = Net()
    run = remat.compile(net, memory_budget=0.0, time_limit=0.3)
    run(batch(1)).sum().backward()
    net.zero_grad()
    twin = copy.deepcopy(run)
    twin(batch(1)).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert len(twin.plans) == 1


def test_a_dynamic_size_is_refused_in_words() -> None:
    options = {"memory_budget": 0.0, "time_limit": 0.3}
    run = torch.compile(Net(), backend="remat", options=options, dynamic=True)
    with pytest.raises(Exception, match="CaptureError: an input has a dynamic size") as caught:
        run(batch(1))
    assert isinstance(caught.value.inner_exception, CaptureError)


def test_an_effect_ordered_by_tokens_is_refused_by_name() -> None:
    class Singular(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve(x.T @ x + torch.eye(32), super().forward(x).T).sum()

    with pytest.raises(CaptureError, match="orders by tokens"):
        remat.compile(Singular(), memory_budget=0.0)(batch(1))
