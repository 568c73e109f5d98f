"""What the caller does with a step beyond its plan: reported, refused, or borne."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.passes.torch_private.autograd import backward_node
from remat.session import UnplannedWarning

OPTIONS: dict[str, Any] = {"executor": "eager", "cost": "flops", "time_limit": 0.3}


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=bias) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).sin()
        return x


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def step_of(net: nn.Module, x: Tensor, **options: Any) -> Any:
    least = remat.plan(net, (x,), memory_budget=0.0, **OPTIONS)
    budget = (least.least_peak + least.baseline_peak) // 2
    return remat.compile(net, memory_budget=budget, **OPTIONS, **options)


def test_what_a_retained_graph_holds_is_reported() -> None:
    net, x = Net(), torch.randn(64, 32)
    step = step_of(net, x)
    y = step(x)
    with pytest.warns(UnplannedWarning, match=r"retain_graph=True.* holds what forward saved"):
        y.sum().backward(retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        for _ in range(3):
            y.square().sum().backward()
            y = step(x)
            y.sum().backward(retain_graph=True)


def test_a_retained_graph_does_not_make_a_budget_impossible() -> None:
    net, x = Net(), torch.randn(64, 32)
    step = step_of(net, x, on_unplanned="ignore")
    for _ in range(5):
        net.zero_grad()
        step(x).square().mean().backward(retain_graph=True)
    assert step.plans[0].peak <= step.plans[0].memory_budget


def test_hooks_that_pack_what_is_saved_are_reported() -> None:
    net, x = Net(), torch.randn(64, 32)
    step = step_of(net, x)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed)
    with hooks, pytest.warns(UnplannedWarning, match="hooks on saved tensors are active"):
        y = step(x)
    y.sum().backward()


class Shared(nn.Module):
    """Returns what only a plan saves."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return (h + 1).sin() * (h + 2).cos(), h


@pytest.mark.parametrize("shape", [(8, 32), (2, 4, 32)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_budget", [None, 1.0, 0.5, 0.0])
def test_a_write_into_an_output_is_right_or_raises(
    memory_budget: float | None, bias: bool, shape: tuple[int, ...]
) -> None:
    net, x = Shared(bias), torch.randn(shape)
    run = remat.compile(net, memory_budget=memory_budget, on_unplanned="ignore", **OPTIONS)
    for _ in range(2):  # which outputs share memory is known from the first call
        y, h = run(x)
        with torch.no_grad():
            h.zero_()
        try:
            found = torch.autograd.grad(y.sum(), net.first.weight)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            assert memory_budget in (0.5, 0.0)
        else:
            wanted = torch.autograd.grad(net(x)[0].sum(), net.first.weight)
            assert torch.equal(found[0], wanted[0])


def test_a_write_after_backward_is_nobodys_business() -> None:
    net, x = Shared(True), torch.randn(2, 4, 32)
    run = remat.compile(net, memory_budget=0.0, on_unplanned="ignore", **OPTIONS)
    for _ in range(2):
        y, h = run(x)
        y.sum().backward()
        with torch.no_grad():
            h.zero_()


class Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_node_of_a_call_is_found_behind_a_deep_history() -> None:
    head = nn.Linear(8, 8)
    compiled = torch.compile(lambda x: (x.view(-1), head(x)), backend="aot_eager", dynamic=False)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(60):  # as many ways back as two to the power of that
        x = x + x.sin()
    view, y = compiled(Foreign.apply(x))
    node = backward_node((view, y))
    assert node is y.grad_fn
    assert type(node).__name__ == "CompiledFunctionBackward"


def test_sparse_gradients_beside_the_graph() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32, sparse=True)
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, x = Embedded(), torch.randn(64, 32)
    step = remat.compile(model, memory_budget="1MiB", **OPTIONS)
    for _ in range(3):
        tokens = torch.randint(50, (64,))
        (step(x).sum() + model.table(tokens).sum()).backward()
    assert model.table.weight.grad.is_sparse


def test_threads_of_the_backend_are_right_or_told_to_wait() -> None:
    """torch lets nobody enter a compiled function while another thread traces one."""
    net, x = Net(), torch.randn(64, 32)
    errors: list[Exception] = []
    options = {"memory_budget": 0.3, "on_unplanned": "ignore", **OPTIONS}
    run = torch.compile(net, backend="remat", options=options, dynamic=False)
    run(x).sum().backward()
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))

    def step() -> None:
        found = torch.autograd.grad(run(x).sum(), list(net.parameters()))
        assert all(map(torch.equal, found, wanted))

    def work() -> None:
        for _ in range(8):  # gradients come and go: plans for other resident bytes
            try:
                step()
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    net.zero_grad()
    for thread in threads:
        thread.join()
    assert [e for e in errors if "using FX to symbolically trace" not in str(e)] == []
    step()


def test_a_profiler_that_comes_in_between_does_not_break_the_steps_after() -> None:
    class Two(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    net, x = Two(), torch.randn(64, 32)
    step = step_of(net, x, on_unplanned="ignore")
    loss = step(x)
    try:
        with torch.profiler.profile():
            loss.backward()
    except RuntimeError as error:
        assert "Profiler" in str(error) or "profiler" in str(error)  # noqa: PT017
    for _ in range(3):
        net.zero_grad()
        step(x).backward()
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(x).backward()
    assert all(map(torch.equal, found, (parameter.grad for parameter in net.parameters())))


class Windows(nn.Module):
    """A buffer that is no dense tensor, read and then written."""

    def __init__(self, state: Tensor, strided: bool) -> None:
        super().__init__()
        self.register_buffer("state", state)
        self.first, self.last, self.strided = nn.Linear(64, 64), nn.Linear(64, 64), strided

    def forward(self, x: Tensor) -> Tensor:
        state = self.state.as_strided((64, 64), (64, 1), 8) if self.strided else self.state
        y = self.first(x)
        y = torch.sin(y @ state.sin()) * torch.sin(state.sum(0)).exp() + (state.mean(1) * y).sin()
        self.state.mul_(0.9)
        return self.last(y).square().mean()


@pytest.mark.parametrize("memory_budget", [1.0, 0.0])
def test_a_copy_of_what_is_overwritten_has_its_strides(memory_budget: float) -> None:
    def gradient(planned: bool) -> Tensor:
        torch.manual_seed(0)
        net = Windows(torch.randn(64, 256)[:, 1::4], strided=False)
        run = remat.compile(net, memory_budget=memory_budget, **OPTIONS) if planned else net
        run(torch.randn(8, 64)).backward()
        return net.first.weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_windows_of_what_is_overwritten_are_refused() -> None:
    net = Windows(torch.randn(8192)[8:], strided=True)
    with pytest.raises(remat.CaptureError, match="read by as_strided and written in forward"):
        remat.plan(net, (torch.randn(8, 64),), memory_budget=0.0, **OPTIONS)
