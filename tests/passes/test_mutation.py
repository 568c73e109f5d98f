"""Reads of what the step overwrites: stock torch returns wrong gradients here without a word."""

import torch
from torch import nn

from remat.passes.mutation import SNAPSHOT, pin_mutated_reads
from remat.passes.split import split
from remat.solvers.schedule import Schedule
from tests.passes.joints import capture, compile_with
from tests.passes.plans import recompute_everything


class ReadThenWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 0.6, 6))
        self.register_buffer("b", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((x * self.w) + self.b.view(6)).exp()
        self.b.add_(1)
        return y.sum()


class UsedInBackward(ReadThenWrite):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w * self.b.clone() + (self.w * 2) * self.b.detach().sin()
        self.b.mul_(3)
        return y.sum()


def step(run: nn.Module, model: nn.Module) -> list[torch.Tensor]:
    x = torch.linspace(1, 2, 6)
    for _ in range(2):
        run(x).backward()
    return [model.w.grad, model.b]


def test_gradients_of_a_recomputed_read_are_those_of_the_old_content() -> None:
    for kind in (ReadThenWrite, UsedInBackward):
        plain, ours = kind(), kind()
        run, seen = compile_with(ours, lambda lowered, baseline: recompute_everything(lowered))
        for want, got in zip(step(plain, plain), step(run, ours), strict=True):
            assert torch.equal(want, got)
        assert seen[0].joint.mutated_primals


def test_a_graph_without_such_reads_is_left_as_it_is() -> None:
    captured = capture(ReadThenWrite(), torch.ones(6))
    assert pin_mutated_reads(captured.joint) is captured.joint
    assert not any(SNAPSHOT in node.meta for node in captured.joint.nodes)


def test_the_copy_is_not_made_where_nobody_is_run_again() -> None:
    model = ReadThenWrite()

    def planner(lowered: object, baseline: Schedule) -> Schedule:
        return baseline

    run, seen = compile_with(model, planner)
    run(torch.ones(6)).backward()
    lowered = seen[0].lowered
    assert any(op.name.endswith(".snapshot") for op in lowered.problem.ops)
    made = []
    for schedule in (seen[0].baseline, recompute_everything(lowered)):
        forward, _ = split(lowered, schedule)
        made.append(any("clone" in str(node.target) for node in forward.graph.nodes))
    assert made == [False, True]
