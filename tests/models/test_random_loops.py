"""Random sequences of forwards, backwards, draws, failures and steps, over one graph or several."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from tests.models.compare import EXECUTORS, Outcome, differences, rounded
from tests.models.loops import (
    WIDTH,
    Residual,
    Run,
    batch,
    planned,
    trained,
    trained_by_inductor,
    trained_by_stock,
)

ACTIONS = (
    "forward", "forward", "smaller", "oldest", "newest", "again", "drop", "evaluate", "draw",
    "fail", "subset", "step", "zero", "freeze",
)  # fmt: skip


class Broken(Residual):
    """The same in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(torch.tanh(self.layers[0](self.norm(x))))
        torch._dynamo.graph_break()
        return x + self.drop(torch.tanh(self.layers[1](self.norm(x))))


class Loop:
    """Carries out actions; what has no meaning where it stands does nothing."""

    def __init__(self, model: nn.Module, run: Run, outcome: Outcome) -> None:
        self.model, self.run, self.outcome = model, run, outcome
        self.waiting: list[Tensor] = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.count = 0

    def do(self, action: str) -> None:
        self.count += 1
        if action in ("forward", "smaller"):
            rows = 6 if action == "forward" else 2
            y = self.run(batch(self.count, rows, WIDTH))
            self.outcome[f"y{self.count}"] = y.detach().clone()
            self.waiting.append(y)
        elif action in ("oldest", "newest", "drop", "again", "fail", "subset"):
            if self.waiting:
                self.consume(action)
        else:
            getattr(self, action)()

    def consume(self, action: str) -> None:
        y = self.waiting.pop(0 if action in ("oldest", "drop") else -1)
        if action == "drop":
            return
        loss = y.square().mean()
        if action == "again":
            loss.backward(retain_graph=True)
            self.waiting.append(y)
        elif action == "subset":
            weight = self.model.layers[1].weight
            self.outcome[f"g{self.count}"] = torch.autograd.grad(loss, [weight])
        elif action == "fail":
            y.register_hook(_fail)
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
        else:
            loss.backward()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.outcome[f"e{self.count}"] = self.run(batch(0)).clone()
        self.model.train()

    def draw(self) -> None:
        self.outcome[f"d{self.count}"] = torch.rand(2)

    def step(self) -> None:
        self.waiting.clear()  # what waits would find its weights changed
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def freeze(self) -> None:
        self.waiting.clear()
        bias = self.model.layers[0].bias
        bias.requires_grad_(not bias.requires_grad)


def _fail(gradient: Tensor) -> None:
    raise ValueError("on purpose")


def check_loop(model: type[nn.Module], actions: Sequence[str], budget: Any, executor: str) -> None:
    """Hold the loop to torch's own graphs: their order of adding up gradients is not plain's."""

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        loop = Loop(model, run, outcome)
        for action in actions:
            loop.do(action)
        # A step that is never ended may still be watched, and one thread has one profiler.
        loop.waiting.clear()
        loop.do("forward")
        loop.do("newest")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_stock = trained_by_stock if executor == "eager" else trained_by_inductor
        wanted = by_stock(model, body)
        with functorch_config.patch(donated_buffer=False):  # without a budget, as stock has it
            found, _ = trained(model, body, lambda model: planned(model, executor, budget))
    compared = differences if executor == "eager" else rounded
    assert compared(wanted, found) == []


def loops(max_size: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=max_size)


BUDGETS = st.sampled_from((0.0, 0.5, None))
QUIET = list(HealthCheck)


@pytest.mark.parametrize("executor", EXECUTORS)
@given(model=st.sampled_from((Residual, Broken)), actions=loops(10), budget=BUDGETS)
@settings(max_examples=4, derandomize=True, suppress_health_check=QUIET, database=None)
def test_a_few_random_loops(executor: str, model: Any, actions: list[str], budget: Any) -> None:
    check_loop(model, actions, budget, executor)


@pytest.mark.fuzz
@pytest.mark.parametrize("executor", EXECUTORS)
@given(model=st.sampled_from((Residual, Broken)), actions=loops(20), budget=BUDGETS)
@settings(max_examples=500, suppress_health_check=QUIET, print_blob=True)
def test_many_random_loops(executor: str, model: Any, actions: list[str], budget: Any) -> None:
    check_loop(model, actions, budget, executor)
