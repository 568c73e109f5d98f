"""Code outside a single graph, a loss above all, counts in the budget of the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat.graphs import OUTSIDE
from remat.measurement import measure, resident_bytes
from remat.passes.torch_private import profiling
from remat.solvers.errors import BudgetTooSmall

VOCABULARY = 2048


class Language(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def net() -> Language:
    torch.manual_seed(0)
    return Language()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 128))


def train(net: nn.Module, run: Callable[[Tensor], Tensor], tokens: Tensor) -> list[Tensor]:
    """One step with the loss outside; its gradients."""
    net.zero_grad()
    logits = run(tokens)
    F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)).backward()
    return [p.grad for p in net.parameters()]


def test_a_loss_outside_the_graph_keeps_a_budget_of_bytes(net: Language, tokens: Tensor) -> None:
    expected = train(net, net, tokens)
    plain = measure(lambda: train(net, net, tokens) and None, resident=(net, tokens)).peak
    # Room for the graph alone without recomputing, not for the step with its loss.
    budget = plain - 3 * 2**20
    step = remat.compile(net, memory_budget=budget, time_limit=0.5)
    for _ in range(2):
        ours = train(net, step, tokens)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert not profiling.is_profiling()
    whole = step.step_plan
    assert whole is not None
    assert whole.memory_budget == budget < whole.baseline_peak
    assert whole.eager_peak == whole.peak  # the loss is where the step peaks
    assert step.plans[0].peak <= budget
    assert str(whole).startswith("step       1 graph call, eager on cpu\n")
    peak = measure(lambda: train(net, step, tokens) and None, resident=(net, tokens), warmup=1).peak
    assert peak <= budget
    assert peak == step.step_plan.peak
    ours = train(net, step, tokens)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_budget_that_cannot_hold_with_the_loss_says_so(net: Language, tokens: Tensor) -> None:
    # Three tensors of logits, and the parameters: no plan of the graph takes less.
    alone = remat.plan(net, (tokens,), memory_budget=0.0, time_limit=0.5).least_peak
    assert alone is not None
    step = remat.compile(net, memory_budget=alone + 2**20, time_limit=0.5)
    train(net, step, tokens)
    with pytest.raises(BudgetTooSmall, match="whole step, with the code outside the graph") as told:
        train(net, step, tokens)
    assert told.value.least_peak > told.value.memory_budget


def test_what_the_loss_adds_is_noted_where_it_fits(net: Language, tokens: Tensor) -> None:
    step = remat.compile(net, memory_budget="1GiB", time_limit=0.5)
    for _ in range(3):
        train(net, step, tokens)
    (plan,) = step.plans
    assert plan.solution.solver == "baseline"
    assert step.step_plan is None
    assert any(note.startswith(OUTSIDE) for note in plan.notes)


def test_what_the_caller_still_holds_of_the_step_before_counts(
    net: Language, tokens: Tensor
) -> None:
    logits = net(tokens)
    held = logits.untyped_storage().nbytes()
    step = remat.compile(net, memory_budget=0.5, time_limit=0.5)
    for _ in range(3):
        net.zero_grad()
        logits = step(tokens)  # the logits of the step before are there until now
        logits.square().mean().backward()
    (known,) = step._remat_session._sequences._lone.values()
    (recorded,) = known.recorded.values()
    assert [p.beside for p in recorded.phases if p.kind == "forward"] == [held]
    assert all(p.beside < 2 * held for p in recorded.phases if p.kind == "backward")


def test_arguments_that_the_graph_does_not_read_are_resident(net: Language, tokens: Tensor) -> None:
    class Padded(Language):
        def forward(self, tokens: Tensor, *unread: object, **more: object) -> Tensor:
            return super().forward(tokens).square().mean()

    unread, more = torch.zeros(1000), {"deep": [torch.zeros(500)]}
    plain, padded = Padded(layers=1), Padded(layers=1)
    bytes_of = {}
    for name, model, given in (("plain", plain, ()), ("padded", padded, (unread, more))):
        step = remat.compile(model, memory_budget=0.5, time_limit=0.5)
        step(tokens, *given).backward()
        bytes_of[name] = step.plans[0].problem.fixed_bytes
    assert bytes_of["padded"] - bytes_of["plain"] == resident_bytes((unread, more))
    step(tokens, torch.zeros(3000)).backward()
    model = resident_bytes((padded, tokens))
    assert step.plans[-1].problem.fixed_bytes == model + 3000 * 4
