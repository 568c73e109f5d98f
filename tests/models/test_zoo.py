"""The training steps are what they claim: one graph, repeatable, and compared bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.steps import differences, restore, run_step, same_bits, snapshot, train_once
from tests.models.zoo import STEPS


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_graph(name: str) -> None:
    step, graphs = STEPS[name](), []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    losses = torch.compile(step.model, backend=count, fullgraph=True)(*step.args)
    torch.autograd.backward(losses)
    assert len(graphs) == 1
    gradients = [p.grad for p in step.model.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_repeats_bit_by_bit(name: str) -> None:
    step, again = STEPS[name](), STEPS[name]()
    outcome = run_step(step.model, step)
    assert differences(outcome, run_step(step.model, step)) == []
    assert differences(outcome, run_step(again.model, again)) == []
    assert differences(step.initial, snapshot(step)) == []


def test_a_seed_decides_the_dropout_masks() -> None:
    step = STEPS["bert"]()
    outcome = run_step(step.model, step, seed=0)
    other = run_step(step.model, step, seed=1)
    assert "loss/0" in differences(outcome, other)


def test_steps_with_buffers_move_them() -> None:
    for name, buffer in (("running_scale", "scale"), ("resnet", "num_batches_tracked")):
        step = STEPS[name]()
        outcome = run_step(step.model, step)
        moved = [key for key in step.initial if key.endswith(buffer)]
        assert moved, name
        assert all(not same_bits(step.initial[key], outcome[key]) for key in moved)


def test_restore_undoes_a_step() -> None:
    step = STEPS["running_scale"]()
    train_once(step.model, step)
    restore(step, step.initial)
    assert differences(step.initial, snapshot(step)) == []
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_two_losses_are_two_outputs() -> None:
    step = STEPS["shared_weights"]()
    assert {"loss/0", "loss/1"} <= run_step(step.model, step).keys()


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert differences({"a": nan}, {"a": nan, "b": nan}) == ["b"]
