"""``keep`` and ``recompute`` over the several graphs of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.backend import plans_of
from remat.passes.torch_private import profiling
from remat.solvers.errors import CaptureError, InvalidOption
from tests.remat.broken import Block, Broken, gradients

# What Dynamo itself does when it resumes with an input that is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

OPTIONS: dict[str, Any] = {"time_limit": 0.5, "executor": "eager"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    watched = profiling.is_profiling()
    if watched:
        profiling.stop_events()
    assert not watched, "the allocator is still being watched after the test"


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(128, 64)


@pytest.mark.parametrize("memory_budget", [0.3, None])
@pytest.mark.parametrize("decision", [{"keep": "blocks.0"}, {"recompute": ("blocks.3",)}])
def test_a_pattern_has_to_mean_a_module_of_one_graph(
    x: Tensor, memory_budget: float | None, decision: dict[str, Any]
) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=memory_budget, **decision, **OPTIONS)
    expected = gradients(net, lambda: net(x).backward())
    for _ in range(2):
        ours = gradients(net, lambda: step(x).backward())
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    first, second = (plan.keep + plan.recompute for plan in step.plans)
    assert (first, second) == (
        ((), ("blocks.3",)) if "recompute" in decision else (("blocks.0",), ())
    )


@pytest.mark.parametrize("memory_budget", [0.3, None])
def test_a_pattern_that_means_no_module_of_any_graph_is_refused(
    x: Tensor, memory_budget: float | None
) -> None:
    step = remat.compile(Broken(), memory_budget=memory_budget, keep="block.7", **OPTIONS)
    with pytest.raises(InvalidOption, match=r"keep='block\.7' matches no module of any graph"):
        step(x)


def test_blocks_with_one_options_object_share_their_patterns(x: Tensor) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.gate(x))

    for pattern, fails in (("gate", False), ("grate", True)):
        torch._dynamo.reset()
        net = nn.Sequential(Block(), Gate())
        options = {"memory_budget": 0.3, "keep": pattern, **OPTIONS}
        for block in net:
            block.compile(backend="remat", options=options, dynamic=False)
        net(x).square().mean().backward()
        if fails:
            with pytest.raises(InvalidOption, match="no module of any graph of this step"):
                net(x)
        else:
            net(x).square().mean().backward()
            assert [plan.keep for plan in plans_of(options)] == [(), ("gate",)]


def test_a_plan_of_several_graphs_says_what_to_do_instead(x: Tensor) -> None:
    with pytest.raises(CaptureError, match=r"use remat\.compile, .* read \.step_plan after the"):
        remat.plan(Broken(), (x,), memory_budget=0.5)
