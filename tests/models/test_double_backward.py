"""Watching for a second backward costs the first one nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import remat
import remat.compilation
from tests.models.compare import EXECUTORS
from tests.models.loops import planned


class Narrowing(nn.Module):
    """Its gradient arrives early in backward, which peaks late."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(torch.sin(self.wide(x))))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_gradient_that_arrives_is_not_held(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = []
    for watched in (True, False):
        torch._dynamo.reset()
        if not watched:
            monkeypatch.setattr(remat.compilation, "on_double_backward", lambda outputs, say: None)
        net, x = Narrowing(), torch.randn(64, 8)
        run = planned(net, executor, None)

        def step(run: nn.Module = run, net: nn.Module = net, x: Tensor = x) -> None:
            run(x).square().sum().backward()
            net.zero_grad()

        peaks.append(remat.measure(step, resident=(net, x)).graph)
    assert peaks[0] == peaks[1]
