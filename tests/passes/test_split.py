"""The emitted graphs are the schedule, and compute what torch's own two graphs compute."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat.measurement import measure
from remat.passes.lower import Lowered
from remat.passes.split import _Backward, split
from remat.solvers.errors import RematError
from remat.solvers.schedule import Schedule, Step
from remat.solvers.simulate import simulate
from tests.passes.joints import capture, compile_with
from tests.passes.plans import random_schedule, recompute_everything


class Everything(nn.Module):
    """Dropout, BatchNorm, views, splits, several outputs of an op, shared weights, in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.outer = nn.Linear(16, 16)
        self.norm, self.layer_norm = nn.BatchNorm1d(16), nn.LayerNorm(16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inner(x).view(4, 8, 48).split(16, dim=-1)
        mixed = F.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.2) @ v
        h = self.norm(self.outer(mixed.reshape(32, 16)))
        h = F.dropout(h.relu_() + x, 0.1) + self.scale
        self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        h = self.layer_norm(h + torch.tanh(self.outer(h)))
        top, _ = h.max(dim=1)
        return h.square().mean(), (top * F.silu(h.sum(1))).mean()


def outcome(run: Callable[..., tuple], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    losses = run(x)
    torch.autograd.backward(losses)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [*losses, *gradients, x.grad.clone(), *buffers, torch.get_rng_state()]


def compare(planner: Callable[[Lowered, Schedule], Schedule]) -> Lowered:
    torch.manual_seed(0)
    x = torch.randn(32, 16, requires_grad=True)
    plain, ours = Everything(), Everything()
    ours.load_state_dict(plain.state_dict())
    reference, _ = compile_with(plain, lambda lowered, baseline: None)
    want = outcome(reference, plain, x)
    run, seen = compile_with(ours, planner)
    got = outcome(run, ours, x)
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b), f"tensor {index} differs"
    return seen[0].lowered


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_give_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    keep, forget = rng.random(), rng.random() * 0.7
    compare(
        lambda lowered, baseline: random_schedule(lowered.problem, rng, keep=keep, forget=forget)
    )


def test_the_baseline_emitted_by_us_gives_the_same_bits() -> None:
    compare(lambda lowered, baseline: baseline)


def test_recomputing_everything_gives_the_same_bits() -> None:
    lowered = compare(lambda lowered, baseline: recompute_everything(lowered))
    names = [op.name for op in lowered.problem.ops]
    assert any(name.endswith(".random_state") for name in names)
    assert "epilogue" in names


@pytest.mark.parametrize("seed", range(3))
def test_the_measured_peak_is_the_simulated_one(seed: int) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 5)
    x = torch.randn(512, 256)
    rng = random.Random(seed)
    run, seen = compile_with(
        lambda x: model(x).square().sum(),
        lambda lowered, baseline: random_schedule(lowered.problem, rng, keep=0.4, forget=0.3),
    )

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    measured = measure(step, resident=(model, x), warmup=2)
    resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    predicted = simulate(seen[0].lowered.problem, seen[0].schedule).peak
    assert measured.peak - resident == predicted


def test_a_schedule_that_reads_what_it_freed_is_refused() -> None:
    w = torch.randn(4, requires_grad=True)
    captured = capture(lambda w: w.exp().sin().sum(), w)
    problem = captured.lowered.problem
    exp = next(v for v, value in enumerate(problem.values) if value.name == "exp")
    boundary = captured.baseline.boundary(problem)
    steps = list(captured.baseline.steps)
    steps.insert(boundary, Step("free", exp))
    with pytest.raises(RematError, match="exp in backward after it was freed"):
        split(captured.lowered, Schedule(tuple(steps)))


def test_no_argument_of_backward_is_held_under_two_names() -> None:
    """A getitem emitted again can bear the name of one that is saved; torch renames the latter."""
    w = torch.randn(4, requires_grad=True)
    backward = _Backward(capture(lambda w: w.exp().sum(), w).lowered, set())
    first = backward._take("getitem", {})
    backward.graph.create_node("call_function", torch.relu, (first,), name="getitem_7")
    second = backward._take("getitem_7", {})
    assert second.name != "getitem_7"
    assert second.target == second.name
    backward.graph.output((second,))
    code = str(torch.fx.GraphModule({}, backward.graph).code)
    assert f"{second.name} = getitem_7" not in code
