"""The allocator is watched no longer than the step that is watched, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.measurement import measure
from remat.passes.torch_private import profiling

# What Dynamo itself does when it resumes with an input that is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        return torch.tanh(self.layers[1](x)).square().mean()


class Whole(Broken):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))).square().mean()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    if profiling.is_profiling():
        profiling.stop_events()


@pytest.fixture(params=[Broken, Whole])
def net(request: pytest.FixtureRequest) -> nn.Module:
    model: nn.Module = request.param()
    return model


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 32)


def compiled(net: nn.Module) -> Any:
    return remat.compile(net, memory_budget=0.5, time_limit=0.3)


def test_an_output_that_is_dropped_ends_it(net: nn.Module, x: Tensor) -> None:
    step = compiled(net)
    loss = step(x)
    assert profiling.is_profiling()
    del loss
    assert not profiling.is_profiling()


def test_an_error_in_backward_ends_it(net: nn.Module, x: Tensor) -> None:
    def fail(gradient: Tensor) -> None:
        raise RuntimeError("in backward")

    step = compiled(net)
    loss = step(x)
    handle = net.layers[1].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        loss.backward()
    assert not profiling.is_profiling()
    handle.remove()
    for _ in range(3):
        step(x).backward()
    assert not profiling.is_profiling()


def test_gradients_that_are_only_asked_for_end_it(net: nn.Module, x: Tensor) -> None:
    step = compiled(net)
    loss = step(x)
    torch.autograd.grad(loss, list(net.parameters()))
    assert not profiling.is_profiling()


def test_the_end_of_the_model_ends_it(net: nn.Module, x: Tensor) -> None:
    step = compiled(net)
    loss = step(x)
    assert profiling.is_profiling()
    del step
    assert not profiling.is_profiling()
    loss.backward()


def test_a_measurement_ends_it_and_the_steps_to_come_are_right(net: nn.Module, x: Tensor) -> None:
    step = compiled(net)
    loss = step(x)
    assert measure(lambda: torch.zeros(1000), warmup=0).peak == 4000
    assert not profiling.is_profiling()
    loss.backward()
    for _ in range(3):
        step(x).backward()
    assert not profiling.is_profiling()


def test_a_backward_on_another_thread_ends_it(net: nn.Module, x: Tensor) -> None:
    step = compiled(net)
    loss = step(x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert all(p.grad is not None for p in net.parameters())
    # Only its own thread can end a recording: it does so when somebody there wants to watch.
    assert measure(lambda: torch.zeros(1000), warmup=0).peak == 4000
    assert not profiling.is_profiling()


def test_a_backward_inside_a_backward_leaves_it_alone(net: nn.Module, x: Tensor) -> None:
    inner = torch.ones(3, requires_grad=True)

    def backward_inside(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            inner.sum().backward()
        return gradient

    step = compiled(net)
    for _ in range(3):
        loss = step(x) * 1
        loss.register_hook(backward_inside)
        loss.backward()
    del loss
    assert not profiling.is_profiling()
