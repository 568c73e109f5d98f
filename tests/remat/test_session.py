"""What a compiled callable remembers: plans, gradients being accumulated, calls without a plan."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import remat
from remat.measurement import measure
from remat.plans import Plan, Unplanned
from remat.session import UnplannedWarning
from remat.solvers.errors import BudgetTooSmall, CaptureError

MIB = 2**20


class Net(nn.Module):
    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(512, 128)


def test_the_budget_holds_while_gradients_are_accumulated(net: Net, x: torch.Tensor) -> None:
    first = remat.plan(net, (x,))
    budget = first.baseline_peak + 1024  # meets the first step, not one that adds to gradients
    step = remat.compile(net, memory_budget=budget, time_limit=2)
    reference = Net()
    reference.load_state_dict(net.state_dict())
    for model, run in ((net, step), (reference, reference)):
        for _ in range(3):
            run(x).backward()
        assert model is net or all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(net.parameters(), reference.parameters(), strict=True)
        )
    measured = measure(lambda: step(x).backward(), resident=(net, x), warmup=2)
    (plan,) = step.plans
    assert plan.peak <= budget
    assert measured.peak == plan.peak
    net.zero_grad()
    step(x).backward()
    assert step.plans[0].solution.solver == "baseline"


def test_a_stored_plan_that_no_longer_suffices_is_refused(net: Net, x: torch.Tensor) -> None:
    plan = remat.plan(net, (x,), memory_budget=0.3, time_limit=1)
    step = remat.compile(net, plan=plan)
    step(x).backward()
    with pytest.raises(BudgetTooSmall, match="more is resident now"):
        step(x)  # gradients are there now
    net.zero_grad()
    step(x).backward()


def test_optimizer_state_that_comes_into_being_is_counted(net: Net, x: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    budget = remat.plan(net, (x,)).baseline_peak + 1024
    step = remat.compile(net, memory_budget=budget, optimizer=optimizer, time_limit=2)

    def train() -> None:
        optimizer.zero_grad()
        step(x).backward()
        optimizer.step()

    train()
    before = step.plans[0].problem.fixed_bytes
    train()
    state = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
    assert step.plans[0].problem.fixed_bytes == before + state
    assert step.plans[0].peak <= budget


def test_a_step_that_no_longer_fits_says_what_has_come_since(net: Net, x: torch.Tensor) -> None:
    least = remat.plan(net, (x,), memory_budget=0.0, time_limit=1).peak
    optimizer = torch.optim.Adam(net.parameters())
    step = remat.compile(net, memory_budget=least + 1024, optimizer=optimizer, time_limit=1)
    step(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BudgetTooSmall, match="This step kept the budget before") as first:
        step(x)
    gradients = sum(p.untyped_storage().nbytes() for p in net.parameters())
    room = first.value.least_peak + gradients
    assert f"memory_budget={room}." in str(first.value)
    # What it says to give is enough for all that comes.
    torch._dynamo.reset()
    step = remat.compile(net, memory_budget=room, optimizer=optimizer, time_limit=1)
    for _ in range(3):
        step(x).backward()


def test_an_inference_call_runs_and_says_that_it_was_not_planned(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=0.5, time_limit=2)
    with torch.no_grad(), pytest.warns(UnplannedWarning, match="gradients are off"):
        result = step(x)
    assert torch.equal(result, net(x))
    (unplanned,) = step.plans
    assert isinstance(unplanned, Unplanned)
    step(x).backward()
    assert isinstance(step.plans[-1], Plan)


def test_many_compiled_models_share_no_limit(x: torch.Tensor) -> None:
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        step = remat.compile(Net(1), memory_budget=1.0)
        step(x).backward()
        assert isinstance(step.plans[0], Plan)


def test_a_call_that_torch_does_not_compile_is_reported(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=1.0)
    strict = remat.compile(net, memory_budget=1.0, on_unplanned="raise")
    with torch._dynamo.config.patch(recompile_limit=1):
        for run in (step, strict):
            run(x).backward()
        with pytest.warns(UnplannedWarning, match="without compiling it"):
            step(x[:100]).backward()
        with pytest.raises(CaptureError, match="without compiling it"):
            strict(x[:100])


def test_on_unplanned_raises_or_is_silent(net: Net, x: torch.Tensor) -> None:
    strict = remat.compile(net, memory_budget=0.5, on_unplanned="raise")
    for _ in range(2):  # not only the first time
        with torch.no_grad(), pytest.raises(CaptureError, match="inference-only"):
            strict(x)
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        remat.compile(net, memory_budget=0.5, on_unplanned="ignore")(x)
        remat.compile(net)(x)


def test_a_plan_of_several_graphs_is_refused_with_the_line_that_breaks(x: torch.Tensor) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.layers[0](x))
            print("in the middle")
            return y.sum()

    with pytest.raises(CaptureError, match=r'test_session.py:\d+ `print\("in the middle"\)`'):
        remat.plan(Broken(), (x,), memory_budget=0.5)


def test_another_shape_gets_another_plan(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=0.5, time_limit=1)
    step(x).backward()
    step(x[:100]).backward()
    first, second = step.plans
    assert second.peak < first.peak
    assert first.graph_hash != second.graph_hash


def test_a_budget_that_cannot_hold_says_what_could(net: Net, x: torch.Tensor) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        remat.compile(net, memory_budget="600KiB", time_limit=2)(x)
    error = caught.value
    assert error.memory_budget == 600 * 1024
    assert error.least_peak >= error.peak_lower_bound > error.memory_budget
    text = str(error)
    assert "The least peak a plan was found for is" in text
    assert "layers." in text
    assert "batch" in text or "Resident bytes alone" in text


def test_exactly_the_least_peak_is_enough(net: Net, x: torch.Tensor) -> None:
    least = remat.plan(net, (x,), memory_budget=0.0, time_limit=2).least_peak
    plan = remat.plan(net, (x,), memory_budget=least, time_limit=2)
    assert plan.peak <= least


def test_a_fraction_moves_with_the_gradients_that_are_there(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=0.2, time_limit=1)
    step(x).backward()
    first = step.plans[0]
    measured = measure(lambda: step(x).backward(), resident=(net, x), warmup=2)
    gradients = sum(p.grad.untyped_storage().nbytes() for p in net.parameters())
    (plan,) = step.plans
    assert plan.memory_budget == first.memory_budget + gradients
    assert plan.least_peak == first.least_peak + gradients
    assert measured.peak == plan.peak <= plan.memory_budget
    assert plan.solution.schedule == first.solution.schedule


def test_a_forward_that_still_waits_for_backward_is_reported(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=0.5, time_limit=1)
    for _ in range(3):
        loss = step(x)
        loss.backward()  # kept alive on purpose: what it saved is gone
    first = step(x)
    with pytest.warns(UnplannedWarning, match="1 earlier forward of this graph still wait"):
        second = step(x + 1)
    (first + second).backward()
    reference = Net()
    reference.load_state_dict(net.state_dict())
    for batch in (x, x, x, x, x + 1):
        reference(batch).backward()
    for ours, plain in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


def test_a_forward_that_was_dropped_is_not_waiting(net: Net, x: torch.Tensor) -> None:
    step = remat.compile(net, memory_budget=0.5, time_limit=1)
    for _ in range(3):
        step(x)
    step(x).backward()


def test_a_named_solver_is_not_replaced_silently(net: Net, x: torch.Tensor) -> None:
    least = remat.plan(net, (x,), memory_budget=0.0, time_limit=1).least_peak
    assert least is not None
    with pytest.raises(BudgetTooSmall, match="solver 'mincut' has no plan within") as caught:
        remat.plan(net, (x,), memory_budget=least + 1024, solver="mincut", time_limit=2)
    assert caught.value.least_peak <= least + 1024
