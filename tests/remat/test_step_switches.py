"""What a whole step switches, steps that no graph can be, and copies of compiled ones."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import BudgetTooSmall, CaptureError

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
        (lambda p: torch.optim.AdamW(p, fused=True), r"_fused_adam\)\. Make it with fused=False"),
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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Adagrad,
        torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop,
    ],
)  # fmt: skip
def test_the_optimizers_that_are_recommended_are_the_plain_ones(make: Any) -> None:
    def run(planned: bool) -> Tensor:
        w = nn.Parameter(torch.linspace(-1, 1, 4))
        optimizer = make([w])

        def step() -> None:
            optimizer.zero_grad()
            w.square().sum().backward()
            optimizer.step()

        run_step = remat.compile_step(step, cost="roofline") if planned else step
        for _ in range(3):
            run_step()
        return w.detach()

    assert torch.equal(run(True), run(False))


def test_a_layer_that_no_graph_can_be_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()

    with pytest.raises(CaptureError, match=r"a layer .*\(batchnorm.py, .* momentum, not None"):
        remat.compile_step(step)()


def test_a_scheduler_is_no_optimizer() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step() -> None:
        loss = w.sum()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)

    with pytest.raises(CaptureError, match=r"test_step_switches.py, line \d+, in step"):
        remat.compile_step(step)()


def test_what_a_first_call_was_given_dies_with_it() -> None:
    trainer = Switching()
    step = remat.compile_step(trainer.step)
    batch = torch.ones(3, 4)
    step(batch)
    gone = [weakref.ref(batch), weakref.ref(trainer.model[0].weight.grad)]
    trainer.model.zero_grad()
    del batch
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_sum_that_a_step_keeps_is_switched_to_nothing() -> None:
    """With its history it would require a gradient, and be no leaf."""

    def run(planned: bool) -> Tensor:
        w, total = nn.Parameter(torch.ones(4)), torch.zeros(())

        def step() -> None:
            loss = w.square().sum()
            loss.backward()
            total.add_(loss.detach())

        run_step = remat.compile_step(step, cost="roofline") if planned else step
        for _ in range(3):
            run_step()
        assert not total.requires_grad
        return total

    assert torch.equal(run(True), run(False))


def test_a_call_that_is_refused_switches_nothing() -> None:
    trainer = Switching()
    trainer.model.eval()
    with pytest.raises(BudgetTooSmall):
        remat.compile_step(trainer.step, memory_budget=100)(torch.ones(3, 4))
    assert not any(part.training for part in trainer.model.modules())
    assert all(p.requires_grad for p in trainer.model.parameters())


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
    trainer, twin = Switching(), Switching()
    step = remat.compile_step(trainer.step)
    torch.manual_seed(1)
    step(torch.ones(3, 4))
    before = trainer.model[0].weight.detach().clone()
    copies = copy.deepcopy(step), pickle.loads(pickle.dumps(step))
    torch.manual_seed(1)
    twin.step(torch.ones(3, 4))
    torch.manual_seed(2)
    twin.step(torch.ones(3, 4))
    for copied in copies:
        torch.manual_seed(2)
        copied(torch.ones(3, 4))
        owner: Any = copied._function.__self__  # type: ignore[attr-defined]
        assert torch.equal(owner.model[0].weight, twin.model[0].weight)
    assert torch.equal(trainer.model[0].weight, before)
    assert len(copy.copy(step).plans) == 0


def test_a_copy_of_a_step_over_a_function_has_the_same_modules() -> None:
    trainer = Switching()
    step = remat.compile_step(lambda x: trainer.step(x), state=(trainer.model, trainer.optimizer))
    before = trainer.model[0].weight.detach().clone()
    copy.deepcopy(step)(torch.ones(3, 4))
    assert not torch.equal(trainer.model[0].weight, before)
