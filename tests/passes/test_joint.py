import pytest
import torch
from torch import nn

from remat.passes.joint import JointGraph
from remat.solvers.errors import CaptureError
from tests.passes.joints import capture, compile_with


class Block(nn.Module):
    def __init__(self, width: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * self.scale)
        self.total.add_(y.detach().sum(0))
        return y.sum()


def phases(captured: object) -> dict[str, str]:
    return {node.name: phase for node, phase in captured.joint.phases.items()}


def test_forward_is_what_outputs_and_effects_need_and_backward_what_reads_a_tangent() -> None:
    found = phases(capture(Block(), torch.randn(3, 4)))
    assert found["tanh"] == "forward"
    assert found["tangents_1"] == "backward"
    assert [name for name, phase in found.items() if "mm" in name and phase == "backward"]


def test_an_op_only_backward_reads_is_deferred() -> None:
    w = torch.randn(5, requires_grad=True)
    captured = capture(lambda w: (w.sin() * 3).sum(), w)
    assert phases(captured)["cos"] == "deferred"


def test_the_hash_ignores_names_and_sees_shapes_and_constants() -> None:
    x = torch.randn(3, 4)
    base = capture(Block(), x).joint.hash
    assert capture(Block(), x).joint.hash == base
    assert capture(Block(), torch.randn(2, 4)).joint.hash != base
    assert capture(Block(scale=3.0), x).joint.hash != base
    assert capture(Block().double(), x.double()).joint.hash != base

    class Renamed(Block):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return Block.forward(self, tokens)

    assert capture(Renamed(), x).joint.hash == base


def test_a_buffer_that_the_step_writes_is_mutated() -> None:
    captured = capture(Block(), torch.randn(3, 4))
    (primal,) = captured.joint.mutated_primals
    assert tuple(primal.meta["val"].shape) == (4,)


def test_a_dynamic_size_is_refused_with_what_to_do() -> None:
    def backend(graph, inputs):
        from remat.passes.torch_private import partition as private

        def partition(module, inputs, *, num_fwd_outputs, **options):
            JointGraph.make(module, num_fwd_outputs)
            raise AssertionError("not refused")

        return private.aot_compile(graph, inputs, partition=partition)

    torch._dynamo.reset()
    run = torch.compile(Block(), backend=backend, dynamic=True)
    with pytest.raises(Exception) as caught:
        run(torch.randn(3, 4))
    assert isinstance(caught.value.inner_exception, CaptureError)
    assert "dynamic=False" in str(caught.value.inner_exception)


def test_capturing_twice_gives_the_same_problem() -> None:
    run, seen = compile_with(Block(), lambda lowered, baseline: None)
    run(torch.randn(3, 4))
    run(torch.randn(5, 4))
    assert len(seen) == 2
    assert seen[0].lowered.problem.ops[0].name == seen[1].lowered.problem.ops[0].name
