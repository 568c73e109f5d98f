"""compile, plan and the backend: one graph, one hash, the plan that ran is the plan one reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
from remat.solvers.errors import CaptureError, InvalidOption, PlanMismatch
from tests.models import zoo


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(256, 64)


def test_a_plan_has_the_hash_of_the_run_and_touches_nothing(x: torch.Tensor) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    plan = remat.plan(net, (x,), loss=mean_square, memory_budget=0.5, time_limit=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())

    step = remat.compile(lambda x: mean_square(net(x)), memory_budget=0.5, time_limit=1)
    step(x).backward()
    assert step.plans[0].graph_hash == plan.graph_hash
    assert step.plans[0].problem.fixed_bytes == plan.problem.fixed_bytes


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_the_hash_of_a_real_model_is_that_of_its_run(name: str) -> None:
    step = zoo.STEPS[name]()
    plan = remat.plan(step.model, step.args)
    run = remat.compile(step.model, cost="roofline")
    run(*step.args).backward()
    assert run.plans[0].graph_hash == plan.graph_hash


def test_planning_allocates_nothing(x: torch.Tensor) -> None:
    from remat.passes.allocations import Allocations

    net, large = Net(1024), torch.randn(2048, 1024)
    with Allocations() as watch:
        remat.plan(net, (large,), loss=mean_square, memory_budget=0.5, time_limit=1)
    assert watch.peak < large.numel() * 4 / 8


def test_the_ninth_plan_is_as_good_as_the_first(x: torch.Tensor) -> None:
    net = Net()
    hashes = {remat.plan(net, (x,), loss=mean_square).graph_hash for _ in range(10)}
    assert len(hashes) == 1


def test_without_a_budget_torchs_own_graphs_run_untouched(x: torch.Tensor) -> None:
    from remat import compilation
    from remat.passes.torch_private import partition as private

    own, ours = [], []
    torch_partition, our_partition = private.default_partition, compilation.partition

    def watch(*args: object, **options: object) -> object:
        own.append(torch_partition(*args, **options))
        return own[-1]

    def watch_ours(*args: object, **options: object) -> object:
        ours.append(our_partition(*args, **options))
        return ours[-1]

    net = Net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "default_partition", watch)
        patch.setattr(compilation, "partition", watch_ours)
        for budget in (None, 1.0, "1GiB"):
            step = remat.compile(net, memory_budget=budget)
            step(x).sum().backward()
            assert step.plans[0].solution.solver == "baseline"
            assert step.plans[0].extra_time == 0
    assert len(own) == len(ours) == 3
    for (forward, backward), parts in zip(own, ours, strict=True):
        assert parts.forward is forward
        assert parts.backward is backward


def test_the_backend_is_registered_and_takes_the_same_options(x: torch.Tensor) -> None:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    options = {"memory_budget": 0.0, "time_limit": 1}
    torch.manual_seed(1)
    mean_square(torch.compile(net, backend="remat", options=options, dynamic=False)(x)).backward()
    torch.manual_seed(1)
    mean_square(twin(x)).backward()
    for ours, plain in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


def test_the_backend_refuses_an_unknown_option(x: torch.Tensor) -> None:
    run = torch.compile(Net(), backend="remat", options={"memory_buget": 0.5})
    with pytest.raises(Exception, match="did you mean 'memory_budget'"):
        run(x)


def test_a_stored_plan_runs_again_and_only_on_its_graph(x: torch.Tensor, tmp_path: Path) -> None:
    net = Net()

    def step(x: torch.Tensor) -> torch.Tensor:
        return mean_square(net(x))

    first = remat.compile(step, memory_budget=0.2, time_limit=1)
    first(x).backward()
    first.plans[0].save(tmp_path / "plan.json")
    net.zero_grad()  # gradients that are there are resident, and the stored budget counts them
    run = remat.compile(step, plan=tmp_path / "plan.json")
    run(x).backward()
    assert run.plans[0].solution.schedule == first.plans[0].solution.schedule
    assert run.plans[0].peak == first.plans[0].peak
    with pytest.raises(PlanMismatch, match="another graph"):
        remat.compile(step, plan=tmp_path / "plan.json")(x[:10])
    other = dataclasses.replace(first.plans[0], executor="inductor")
    with pytest.raises(PlanMismatch, match="made for the inductor executor"):
        remat.compile(step, plan=other)(x)


def test_regions_the_user_checkpoints_make_no_fastest_plan(x: torch.Tensor) -> None:
    from torch.utils.checkpoint import checkpoint

    net = Net()
    step = remat.compile(lambda x: mean_square(checkpoint(net, x, use_reentrant=False)))
    step(x).backward()
    (plan,) = step.plans
    assert plan.solution.solver == "baseline"
    assert plan.solution.status == "feasible"
    assert plan.gap > 0


def test_a_described_device_has_its_own_memory_and_roofline(x: torch.Tensor) -> None:
    plan = remat.plan(Net(), (x,), loss=mean_square, memory_budget="50%", device="h100")
    assert plan.memory_budget == 40 * 10**9
    net = Net()
    step = remat.compile(lambda x: mean_square(net(x)), memory_budget=1.0, device="h100")
    step(x).backward()
    assert step.plans[0].problem.cost.startswith("roofline on h100")


def test_a_model_without_trainable_parameters_is_refused(x: torch.Tensor) -> None:
    frozen = Net().requires_grad_(False)
    for attempt in (lambda: remat.compile(frozen), lambda: remat.plan(frozen, (x,))):
        with pytest.raises(InvalidOption, match="no trainable parameters"):
            attempt()


def test_what_is_no_model_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(InvalidOption, match="takes a module or a function"):
        remat.compile("model")
    with pytest.raises(InvalidOption, match=r"takes a torch\.nn\.Module"):
        remat.plan(lambda x: x, (x,))
    with pytest.raises(InvalidOption, match="sequence of arguments"):
        remat.plan(Net(), x)


def test_a_step_whose_loss_needs_no_gradient_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="nothing in this step needs a gradient"):
        remat.plan(Net(), (x,), loss=lambda y: y.detach().sum())


def test_the_compiled_model_is_otherwise_the_model(x: torch.Tensor) -> None:
    net = Net()
    compiled = remat.compile(net)
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert compiled.drop is net.drop
    compiled.eval()
    assert not net.training
    with pytest.raises(AttributeError):
        _ = compiled.nothing_of_that_name


def test_a_step_can_be_planned_for_a_device_that_is_not_here(x: torch.Tensor) -> None:
    plan = remat.plan(Net(), (x,), loss=mean_square, memory_budget="80%", device="h100")
    assert plan.memory_budget == int(0.8 * 80e9)
    assert plan.device.startswith("h100")
    states = [v for v in plan.problem.values if v.name.endswith(".random_state")]
    assert all(v.bytes % 512 == 0 for v in plan.problem.values if v not in states)
    assert any("planned for h100" in note for note in plan.notes)
    assert any("workspace not measured" in note for note in plan.notes)


def test_a_plan_for_double_backward_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(InvalidOption, match=r"double_backward=True runs a graph .* uncompiled"):
        remat.plan(Net(), (x,), loss=mean_square, double_backward=True)
