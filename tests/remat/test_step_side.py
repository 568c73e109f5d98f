"""What a whole step does in Python beside its graph, and what its key tells apart."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.solvers.errors import CaptureError


def test_what_a_step_does_beside_its_tensors_is_refused() -> None:
    w, losses = nn.Parameter(torch.ones(4)), []
    drop, scaled = nn.Dropout(0.5), {"by": torch.ones(4), "times": 0}
    generator = torch.Generator()

    def train(x: Tensor) -> Tensor:
        return torch.autograd.grad((w * x).square().sum(), w)[0]

    def seeds() -> Tensor:
        torch.manual_seed(0)
        return train(torch.rand(4))

    def seeds_its_own() -> Tensor:
        generator.manual_seed(0)
        return train(torch.rand(4, generator=generator))

    def checkpoints() -> Tensor:
        return train(checkpoint(drop, w, use_reentrant=False))

    def collects() -> Tensor:
        losses.append(w.sum().item())
        return train(w)

    def counts() -> Tensor:
        scaled["times"] += 1
        return train(scaled["by"])

    def hides() -> Any:
        return SimpleNamespace(gradient=train(w))

    for step, message in (
        (seeds, "seeds a random generator"),
        (seeds_its_own, "seeds a random generator"),
        (checkpoints, "over dropout"),
        (collects, "a number that was read out of a tensor in losses"),
        (counts, "a number in scaled, beside tensors"),
        (hides, "a SimpleNamespace with tensors in it"),
    ):
        with pytest.raises(CaptureError, match=message):
            remat.compile_step(step, cost="roofline")()


def test_a_graph_that_would_have_to_count_is_not_run_again() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train(by: float) -> Tensor:
        return torch.autograd.grad((w * by).sum(), w)[0]

    class Trainer:
        def __init__(self) -> None:
            self.number = 0

        def step(self) -> Tensor:
            self.number = (self.number + 1) % 2
            return train(self.number + 1)

    def scheduled() -> None:
        w.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    trainer = Trainer()
    run = remat.compile_step(trainer.step, cost="roofline")
    assert [run()[0].item() for _ in range(2)] == [2.0, 1.0]
    with pytest.raises(CaptureError, match="the step changes number in Python"):
        run()
    run = remat.compile_step(lambda: train(random.random()), cost="roofline")
    run()
    with pytest.raises(CaptureError, match="Python's or NumPy's random generator"):
        run()
    run = remat.compile_step(scheduled, cost="roofline")
    run()
    with pytest.raises(CaptureError, match="the step changes schedule in Python"):
        run()


def test_what_settles_a_step_is_in_its_key() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(3, 4)
    net.act, settings = torch.tanh, {"a": 1.0, "b": 2.0}

    def step(x: Tensor) -> tuple[Tensor, ...]:
        scale = next(iter(settings))
        loss = net.act(net(x)).sum() * settings[scale] + len(scale)
        return torch.autograd.grad(loss, list(net.parameters()))

    run = remat.compile_step(step, cost="roofline")

    def check(graphs: int) -> None:
        assert all(map(torch.equal, run(x), step(x)))
        assert len(run.plans) == graphs

    check(1)
    check(1)
    net.act = torch.sin
    check(2)
    handle = net[0].register_forward_hook(lambda module, args, output: output * 2)
    check(3)
    handle.remove()
    check(3)  # the second graph again
    settings.update({"a": settings.pop("a")})
    check(4)


def test_a_content_made_from_what_another_update_writes() -> None:
    p, q = torch.randn(64), torch.randn(64)
    w = nn.Parameter(torch.randn(64))

    def step() -> Tensor:
        content = torch.tanh(p * 2)
        loss = (torch.sin(w * content) * q).sum()
        (gradient,) = torch.autograd.grad(loss, w)
        q.copy_(content)
        p.add_(1)
        return gradient

    state = [t.clone() for t in (p, q)]
    wanted = [step(), p.clone(), q.clone()]
    p.copy_(state[0])
    q.copy_(state[1])
    run = remat.compile_step(step, memory_budget=0.0, time_limit=0.2, cost="roofline")
    assert all(map(torch.equal, [run(), p, q], wanted))
