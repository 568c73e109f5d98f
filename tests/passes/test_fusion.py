"""What a fusing compiler does not store, against small graphs worked out by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx, nn

from remat.passes.fusion import Fusion, fuse
from remat.passes.joint import JointGraph
from remat.passes.overwrite import overwrite_inputs
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from tests.passes.joints import capture, compile_with, is_product
from tests.passes.plans import random_schedule, recompute_everything


class Block(nn.Module):
    """A product, a chain of pointwise ops, a product, a residual, a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        g = torch.tanh(h * 0.5) * h
        return ((x + self.down(g)) ** 2).sum()


def fused(function: nn.Module, *inputs: Tensor) -> tuple[JointGraph, Fusion]:
    joint = capture(function, *inputs).joint
    return joint, fuse(joint, is_product)


def named(nodes: frozenset[fx.Node], target: str) -> list[fx.Node]:
    return [node for node in nodes if target in str(node.target)]


def test_a_pointwise_chain_is_inlined_up_to_what_a_product_reads() -> None:
    joint, found = fused(Block(), torch.randn(4, 8, requires_grad=True))
    targets = {str(node.target) for node in found.inlined}
    assert "aten.tanh.default" in targets
    # The chain's last value feeds a product, in forward and again in backward.
    feeds = [
        node
        for node in joint.nodes
        if any(is_product(user) for user in node.users) and found.kinds.get(node) == "pointwise"
    ]
    assert feeds
    assert not found.inlined & set(feeds)


def test_products_outputs_and_what_is_returned_are_stored() -> None:
    joint, found = fused(Block(), torch.randn(4, 8, requires_grad=True))
    returned = {
        node
        for node in (*joint.forward_outputs, *joint.backward_outputs)
        if isinstance(node, fx.Node)
    }
    assert not found.inlined & returned
    assert not [node for node in found.inlined if is_product(node)]


def test_what_is_read_through_an_inlined_node_is_what_it_is_computed_from() -> None:
    joint, found = fused(Block(), torch.randn(4, 8, requires_grad=True))
    (tanh,) = [
        node
        for node in found.inlined
        if str(node.target) == "aten.tanh.default" and joint.phases[node] == "forward"
    ]
    (creator,) = found.reads[tanh]
    assert is_product(creator)
    assert len(found.operations[tanh]) == 2  # the multiplication and itself


class Sum(nn.Module):
    """A sum of ``count`` products, read twice."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        total = sum(x @ weight for weight in self.weights)
        return (total.exp() + total.sin()).sum()


@pytest.mark.parametrize(("count", "stored"), [(1, False), (2, True), (6, True)])
def test_a_sum_smaller_than_its_terms_is_worth_keeping(count: int, stored: bool) -> None:
    joint, found = fused(Sum(count), torch.randn(4, 8))
    adds = [
        n for n in joint.nodes if "add.Tensor" in str(n.target) and joint.phases[n] == "forward"
    ]
    assert (adds[count - 1] not in found.inlined) is stored


class Wide(nn.Module):
    """Reads more values than a compiler inlines into two readers."""

    def forward(self, *values: Tensor) -> Tensor:
        total = values[0]
        for value in values[1:]:
            total = total * value
        return torch.stack((total.exp(), total.sin())).sum()


def test_a_value_that_reads_many_and_is_read_twice_is_stored() -> None:
    few, many = (
        fused(Wide(), *(torch.randn(4, requires_grad=True) for _ in range(count)))
        for count in (2, 7)
    )
    for (joint, found), stored in ((few, False), (many, True)):
        last = [n for n in joint.nodes if "mul" in str(n.target) and joint.phases[n] == "forward"][
            -1
        ]
        assert (last not in found.inlined) is stored


def test_ops_between_the_same_products_that_share_a_value_are_one_kernel() -> None:
    joint, found = fused(Block(), torch.randn(4, 8, requires_grad=True))
    for node, kernel in found.kernel.items():
        for other, its in found.kernel.items():
            if its == kernel:
                assert joint.phases[node] == joint.phases[other]
    backward = [node for node in found.kernel if joint.phases[node] == "backward"]
    assert len({found.kernel[node] for node in backward}) < len(backward)


@pytest.mark.parametrize("seed", range(6))
def test_inlining_changes_no_number(seed: int) -> None:
    """Whatever is recomputed, and however often: every reader has its own copy of the chain."""

    def planner(lowered: object, _: Schedule) -> Schedule:
        if seed == 0:
            return recompute_everything(lowered)  # type: ignore[arg-type]
        rng = random.Random(seed)
        return random_schedule(lowered.problem, rng, keep=0.5, forget=0.5)  # type: ignore[attr-defined]

    plain, model = Block(), Block()
    x = torch.randn(4, 8)
    run, seen = compile_with(model, planner, inlines=True)
    loss = run(x)
    loss.backward()
    expected = plain(x)
    expected.backward()
    assert seen[0].lowered.storages.inlined
    assert torch.equal(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_gradient_is_written_over_the_one_it_is_computed_from() -> None:
    captured = capture(Chain(), torch.randn(64, requires_grad=True), inlines=True)
    found = fuse(captured.joint, is_product)
    for donated in (False, True):
        lowered = overwrite_inputs(captured.lowered, found, donated=donated)
        spared = [op for op in lowered.problem.ops if op.workspace < 0]
        assert all(op.phase == "backward" for op in spared)
        before = simulate(captured.lowered.problem, captured.baseline)
        after = simulate(lowered.problem, captured.baseline)
        assert after.seconds == before.seconds
    assert spared, "with saved tensors donated, the product's result is written over"


class Chain(nn.Module):
    """Two products with pointwise ops between them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.sigmoid(x.unsqueeze(0) @ self.a) @ self.b).sum()
