"""A whole step in one graph: the numbers of the plain function, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat.cost import link
from remat.passes.transfers import stored_count
from remat.passes.updates import baseline_peak
from remat.solvers.errors import BudgetTooSmall, CaptureError, InvalidOption
from remat.solvers.problem import Link
from remat.solvers.schedule import Decision, decisions
from tests.models.networks import RunningScale

Step = Callable[..., Any]


class Decoder(nn.Module):
    """A pre-norm block of causal attention and an MLP, tied embedding, dropout."""

    def __init__(self, vocabulary: int = 128, hidden: int = 64, blocks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, 2, -1)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class Normed(nn.Module):
    """Batch norm writes its statistics in forward."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)]
        self.net = nn.Sequential(
            *parts, nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Linear(128, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The usual loop's body."""

    def step(*batch: Tensor) -> Tensor:
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state[p] for p in model.parameters()]
    held = [v for state in states for v in state.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *held, *gradients, torch.get_rng_state()]


def tokens() -> Tensor:
    return torch.randint(0, 128, (8, 32))


def rows() -> Tensor:
    return torch.randn(256, 32)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
MODELS = {"decoder": (Decoder, tokens), "batchnorm": (Normed, rows)}


@pytest.mark.parametrize(("model", "optimizer"), [("decoder", "adamw"), ("batchnorm", "sgd")])
def test_a_step_is_the_plain_step_within_its_budget(model: str, optimizer: str) -> None:
    torch.manual_seed(0)
    kind, batch = MODELS[model]
    net = kind()
    twin = copy.deepcopy(net)
    ours, theirs = (OPTIMIZERS[optimizer](m.parameters()) for m in (net, twin))
    step = remat.compile_step(
        training(net, ours), memory_budget=0.2, time_limit=0.5, cost="roofline"
    )
    plain = training(twin, theirs)
    for seed in range(3):
        x = batch()
        torch.manual_seed(seed)
        loss = plain(x)
        wanted_state = everything(twin, theirs)
        torch.manual_seed(seed)
        assert torch.equal(step(x), loss)
        for found, wanted in zip(everything(net, ours), wanted_state, strict=True):
            assert torch.equal(found, wanted)
        for held in (ours, theirs):  # a scheduler: read anew, no other graph
            held.param_groups[0]["lr"] *= 0.7
    first, plan = step.plans  # the optimizer's state is made in the first step
    assert first.problem.fixed_bytes < plan.problem.fixed_bytes
    kinds = decisions(plan.problem, plan.solution.schedule).values()
    assert Decision.RECOMPUTE in kinds
    measured = remat.measure(lambda: step(x), resident=(net, ours, x))
    assert measured.peak <= plan.peak <= plan.memory_budget < plan.baseline_peak
    assert measured.peak > 0.99 * plan.peak


def test_gradients_by_hand_and_parameters_as_arguments() -> None:
    torch.manual_seed(0)

    def step(weights: list[Tensor], momenta: list[Tensor], x: Tensor) -> dict[str, Any]:
        h = x
        for w in weights:
            h = torch.tanh(h @ w)
        loss = h.square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for w, m, g in zip(weights, momenta, gradients, strict=True):
                m.mul_(0.9).add_(g)
                w.sub_(0.1 * m)
        return {"loss": loss, "first": gradients[0], "weights": weights, "name": "step"}

    run = remat.compile_step(memory_budget=0.0, time_limit=0.2, cost="roofline")(step)
    ours = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
    theirs = [w.detach().clone().requires_grad_() for w in ours]
    momenta = [[torch.zeros(32, 32) for _ in range(4)] for _ in range(2)]
    for _ in range(2):
        x = torch.randn(512, 32)
        found, wanted = run(ours, momenta[0], x), step(theirs, momenta[1], x)
        assert torch.equal(found["loss"], wanted["loss"])
        assert torch.equal(found["first"], wanted["first"])
        assert found["name"] == "step"
        assert all(a is b for a, b in zip(found["weights"], ours, strict=True))
        for a, b in zip([*ours, *momenta[0]], [*theirs, *momenta[1]], strict=True):
            assert torch.equal(a, b)
    assert len(run.plans) == 1


def test_rates_that_are_tensors_and_inputs_that_swap_places() -> None:
    weights = [torch.ones(4, requires_grad=True) for _ in range(2)]
    rates = [torch.tensor(0.5) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=r) for w, r in zip(weights, rates, strict=True)]
    pairs = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]

    def training_of(w: Tensor, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: Tensor, a: Tensor, b: Tensor) -> None:
            optimizer.zero_grad()
            (w * x).sum().backward()
            optimizer.step()
            before = a.clone()
            a.copy_(b)
            b.copy_(before)

        return step

    plain, ours = (training_of(w, o) for w, o in zip(weights, optimizers, strict=True))
    run = remat.compile_step(ours, cost="roofline")
    for _ in range(3):
        plain(torch.ones(4), *pairs[0])
        run(torch.ones(4), *pairs[1])
        assert torch.equal(*weights)
        assert all(map(torch.equal, pairs[0], pairs[1]))
        for rate in rates:
            rate.mul_(0.5)
    assert len(run.plans) == 2  # without a gradient there at first, and with one


def test_gradients_that_a_step_leaves_behind() -> None:
    net, x = Normed(), rows()
    twin = copy.deepcopy(net)

    def accumulate(model: nn.Module) -> Step:
        def step(x: Tensor) -> None:
            model(x).backward()

        return step

    run = remat.compile_step(accumulate(net), memory_budget=0.5, time_limit=0.2, cost="roofline")
    plain = accumulate(twin)
    for seed in range(3):  # none there, there, there and at the same place
        for each in (run, plain):
            torch.manual_seed(seed)
            each(x)
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert len(run.plans) == 2


def test_a_buffer_that_is_read_and_written_in_every_block() -> None:
    torch.manual_seed(0)
    net = RunningScale()
    twin = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, twin))
    x, labels = torch.randn(64, 128), torch.randint(0, 8, (64,))
    step = remat.compile_step(
        training(net, ours), memory_budget=0.0, time_limit=0.2, cost="roofline"
    )
    plain = training(twin, theirs)
    for _ in range(2):
        assert torch.equal(step(x, labels), plain(x, labels))
        for a, b in zip(everything(net, ours), everything(twin, theirs), strict=True):
            assert torch.equal(a, b)


def test_updates_run_early_where_that_lowers_the_peak() -> None:
    """Gradients as large as all else: at the end, all would be there at once."""
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(8)]

    def step(x: Tensor) -> None:
        h = x
        for w in weights:
            h = torch.tanh(h @ w)
        gradients = torch.autograd.grad(h.sum(), weights)
        with torch.no_grad():
            for w, g in zip(weights, gradients, strict=True):
                w.sub_(g)

    plan = remat.compile_step(step, cost="roofline").plan(torch.randn(4, 256))
    size = 256 * 256 * 4
    assert baseline_peak(plan.problem) - plan.problem.fixed_bytes < 4 * size
    order = [op.name for op in plan.problem.ops]
    assert order.index(next(n for n in order if n.endswith(".update"))) < len(order) - 8


def test_a_whole_step_may_be_asked_for_its_plan_alone() -> None:
    net, x = Normed(), rows()
    before = copy.deepcopy(net.state_dict())
    step = remat.compile_step(
        training(net, torch.optim.SGD(net.parameters(), lr=0.1)), memory_budget=0.5, time_limit=0.2
    )
    plan = step.plan(x)
    assert plan.peak <= plan.memory_budget
    assert "whole step in one graph" in "\n".join(plan.notes)
    assert {op.layer for op in plan.problem.ops} >= {"net.0", "net.1"}
    assert step.plans == ()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert plan.device == "cpu"


def test_a_step_is_planned_for_a_gpu_that_is_not_here() -> None:
    net = Normed()
    step = remat.compile_step(
        training(net, torch.optim.SGD(net.parameters(), lr=0.1)), memory_budget=0.5, device="h100",
        time_limit=1,
    )  # fmt: skip
    plan = step.plan(rows())
    assert plan.device == "h100-sxm"
    assert plan.problem.fixed_bytes % 512 == 0


def test_a_step_planned_for_a_gpu_runs_by_the_kernels_that_are_here() -> None:
    q, x = torch.randn(1, 2, 128, 64, requires_grad=True), torch.randn(1, 2, 128, 64)

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, x, x).sum(), q)[0]

    planned = remat.compile_step(step, time_limit=0.2, cost="roofline", device="h100")
    assert torch.allclose(planned(x), step(x), atol=1e-5)


def test_a_generator_of_the_callers_is_drawn_from_as_often_as_by_the_plain_step() -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
    generator = torch.Generator().manual_seed(1)

    def step() -> Tensor:
        h = x
        for _ in range(3):
            h = torch.tanh(h @ w)
            h = h * torch.bernoulli(torch.full_like(h, 0.5), generator=generator)
        return torch.autograd.grad(h.sum(), w)[0]

    compiled = remat.compile_step(step, memory_budget=0.0, time_limit=0.2, cost="roofline")
    found = [compiled() for _ in range(2)]
    after = generator.get_state()
    generator.manual_seed(1)
    assert all(torch.equal(ours, step()) for ours in found)
    assert torch.equal(generator.get_state(), after)
    assert compiled.plans[0].peak < compiled.plans[0].baseline_peak


def test_a_budget_no_step_can_keep() -> None:
    net = Normed()
    step = remat.compile_step(
        training(net, torch.optim.SGD(net.parameters(), lr=0.1)), memory_budget=1000, time_limit=1
    )
    with pytest.raises(BudgetTooSmall, match="1000 bytes"):
        step(rows())


def _takes(step: Step, *args: Any) -> Any:
    return remat.compile_step(step, time_limit=1, cost="roofline")(*args)


def test_what_cannot_be_one_graph_is_refused_in_words() -> None:
    w = torch.randn(4, requires_grad=True)
    with pytest.raises(CaptureError, match="computes no gradients"):
        _takes(lambda x: x * 2, torch.ones(2))

    def branches(w: Tensor) -> None:
        loss = w.sum()
        if loss > 0:
            torch.autograd.grad(loss, w)

    with pytest.raises(CaptureError, match="asks a tensor for its content"):
        _takes(branches, w)

    class Hidden:
        inside = torch.ones(4)

    def reads(w: Tensor) -> Tensor:
        return torch.autograd.grad((w * Hidden.inside).sum(), w)[0]

    with pytest.raises(CaptureError, match="no argument, no variable it names"):
        _takes(reads, w)

    optimizer = torch.optim.SGD([w], lr=0.1)

    def schedules() -> None:
        w.sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(CaptureError, match="changes the learning rate"):
        _takes(schedules)


def test_writes_into_shared_memory_are_refused() -> None:
    base = torch.ones(8)
    w = torch.randn(4, requires_grad=True)

    def step(whole: Tensor, part: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((w * part).sum(), w)
        part.add_(1)
        return gradient + whole[:4]

    with pytest.raises(CaptureError, match="another of its inputs shares"):
        _takes(step, base, base[:4])


def test_numbers_that_change_are_captured_a_few_times_only() -> None:
    w = torch.randn(4, requires_grad=True)
    step = remat.compile_step(lambda k: torch.autograd.grad((w * k).sum(), w)[0], cost="roofline")
    for k in range(8):
        assert torch.equal(step(float(k)), torch.full((4,), float(k)))
    with pytest.raises(CaptureError, match="captured 8 times"):
        step(9.0)


def test_a_whole_step_offloads_to_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "find_link", lambda where, spec: Link(1e15, 1e15))
    torch.manual_seed(0)
    net = Normed()
    twin = copy.deepcopy(net)
    ours, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (net, twin))
    options = {"time_limit": 0.5, "cost": "roofline"}
    step = remat.compile_step(training(net, ours), memory_budget=0.0, offload=tmp_path, **options)
    plain = training(twin, theirs)
    for seed in range(3):
        x = rows()
        torch.manual_seed(seed)
        loss = plain(x)
        wanted = everything(twin, theirs)
        torch.manual_seed(seed)
        assert torch.equal(step(x), loss)
        assert all(map(torch.equal, everything(net, ours), wanted))
    plan = step.plans[-1]
    assert plan.offloaded_bytes > 0
    measured = remat.measure(lambda: step(x), resident=(net, ours, x))
    assert measured.peak <= plan.peak <= plan.memory_budget
    assert stored_count() == 0
    assert list(tmp_path.iterdir()) == []


def test_options_that_say_nothing_here() -> None:
    with pytest.raises(InvalidOption, match='not "inductor"'):
        remat.compile_step(lambda: None, executor="inductor")
    with pytest.raises(InvalidOption, match="takes the function of a whole step"):
        remat.compile_step(nn.Linear(1, 1))
    with pytest.raises(InvalidOption, match="double_backward= says nothing"):
        remat.compile_step(lambda: None, double_backward=True)
    with pytest.raises(InvalidOption, match="state= takes modules"):
        remat.compile_step(lambda: None, state=3)()
    with pytest.raises(InvalidOption, match="did you mean"):
        remat.compile_step(lambda: None, memory_buget=0.5)


@pytest.mark.parametrize("cached", [True, False])
def test_a_weight_used_twice_under_autocast_is_cast_as_often_as_by_the_plain_step(
    cached: bool,
) -> None:
    def trained(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                loss = layer(layer(layer(x))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = remat.compile_step(step, cost="roofline", memory_budget=0.0) if planned else step
        losses = [run(torch.randn(8, 16)) for _ in range(3)]
        return [*losses, *layer.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))
