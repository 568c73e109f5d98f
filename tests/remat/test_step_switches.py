"""What a whole step switches, steps that no graph can be, and copies of compiled ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import CaptureError

Step = Callable[[Tensor], Any]


class Switching:
    """Trains; its step leaves modules in other modes than it found them, and weights frozen."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        self.model.train()
        self.model[2].bias.requires_grad_(False)
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.model[1].eval()
        return loss

    def state(self) -> Any:
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return (
            [part.training for part in self.model.modules()],
            [p.requires_grad for p in self.model.parameters()],
            gradients,
            [p.detach().clone() for p in self.model.parameters()],
            torch.get_rng_state(),
        )


def test_what_a_step_switches_is_switched_by_every_run() -> None:
    def train(prepare: Callable[[Switching], Step]) -> list[Any]:
        trainer, seen = Switching(), []
        step = prepare(trainer)
        torch.manual_seed(5)
        for number in range(5):
            seen.append((step(torch.full((3, 4), float(number))).detach(), trainer.state()))
            if number in (1, 2):  # an evaluation, and thawing
                trainer.model.eval().requires_grad_(True)
        return seen

    plain = train(lambda trainer: trainer.step)
    planned = train(lambda trainer: remat.compile_step(trainer.step, memory_budget=0.0))
    torch.testing.assert_close(planned, plain, rtol=0, atol=0)


def test_a_plan_switches_nothing() -> None:
    trainer = Switching()
    trainer.model.eval()
    before = trainer.state()
    remat.compile_step(trainer.step).plan(torch.ones(3, 4))
    torch.testing.assert_close(trainer.state(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), r"_fused_adam\): make it with fused=False"),
        (lambda p: torch.optim.Adafactor(p), r"_adafactor.py, line \d+, in .* AdamW"),
        (lambda p: torch.optim.ASGD(p), r"asgd.py, line \d+, in"),
    ],
)
def test_an_optimizer_that_no_graph_can_be_is_named(make: Any, message: str) -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = make([w])

    def step() -> None:
        w.square().sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=message):
        remat.compile_step(step)()


def test_a_layer_that_no_graph_can_be_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()

    with pytest.raises(CaptureError, match=r"batchnorm layer .* wants a momentum, not None"):
        remat.compile_step(step)()


def test_the_line_that_asks_for_a_content_is_named() -> None:
    w = nn.Parameter(torch.ones(4))

    def step() -> None:
        loss = w.sum()
        if loss > 0:
            loss.backward()

    with pytest.raises(CaptureError, match=r"test_step_switches.py, line \d+, in step"):
        remat.compile_step(step)()


@remat.compile_step
def decorated(w: Tensor) -> Tensor:
    return torch.autograd.grad(w.square().sum(), w)[0]


def test_copies_of_a_compiled_step_are_those_of_its_function() -> None:
    w = torch.ones(3, requires_grad=True)
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert torch.equal(copy.deepcopy(decorated)(w), 2 * w)
    trainer = Switching()
    step = remat.compile_step(trainer.step)
    step(torch.ones(3, 4))
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        before = trainer.model[0].weight.detach().clone()
        copied(torch.ones(3, 4))  # the method of another trainer
        assert torch.equal(trainer.model[0].weight, before)
    assert len(copy.copy(step).plans) == 0
