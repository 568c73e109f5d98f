"""A training step that can be run again and again from the same state, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Losses = Tensor | tuple[Tensor, ...]
Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingStep:
    """A model whose forward returns its loss (or several), and what to call it with."""

    name: str
    model: nn.Module
    args: tuple[Tensor, ...]
    initial: Outcome = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", snapshot(self))


def snapshot(step: TrainingStep) -> Outcome:
    """Copies of parameters, buffers and arguments: everything a step may write."""
    return {name: tensor.detach().clone() for name, tensor in _state(step).items()}


@torch.no_grad()
def restore(step: TrainingStep, state: Outcome) -> None:
    """Write ``state`` back in place and drop the gradients."""
    for name, tensor in _state(step).items():
        tensor.copy_(state[name])
    step.model.zero_grad(set_to_none=True)


def resident(step: TrainingStep) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What is there before the step starts, as ``remat.measure`` wants it."""
    return step.model, step.args


def train_once(run: Callable[..., Losses], step: TrainingStep) -> Losses:
    """Forward and backward of the summed losses; the losses stay alive, as a caller's would."""
    losses = run(*step.args)
    torch.autograd.backward(losses if isinstance(losses, tuple) else (losses,))
    return losses


def run_step(run: Callable[..., Losses], step: TrainingStep, seed: int = 0) -> Outcome:
    """Run one step from the initial state and the seed; copies of everything it left behind.

    Keys: ``loss/0``, ``gradient/<parameter>``, ``buffer/<name>``, ``argument/0``, ``rng``. A
    parameter without a gradient has no key.
    """
    restore(step, step.initial)
    torch.manual_seed(seed)
    losses = train_once(run, step)
    outcome = {"rng": torch.get_rng_state()}
    for index, loss in enumerate(losses if isinstance(losses, tuple) else (losses,)):
        outcome[f"loss/{index}"] = loss.detach().clone()
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            outcome[f"gradient/{name}"] = parameter.grad.clone()
    for name, tensor in _state(step).items():
        if not name.startswith("parameter/"):
            outcome[name] = tensor.detach().clone()
    restore(step, step.initial)
    return outcome


def differences(left: Outcome, right: Outcome) -> list[str]:
    """Keys whose tensors are not equal bit for bit, or that only one side has."""
    names = sorted(left.keys() | right.keys())
    return [
        name
        for name in names
        if name not in left or name not in right or not same_bits(left[name], right[name])
    ]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in dtype, shape and every bit; a NaN equals itself, 0.0 does not equal -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _state(step: TrainingStep) -> dict[str, Any]:
    state = {f"parameter/{name}": p for name, p in step.model.named_parameters()}
    state |= {f"buffer/{name}": b for name, b in step.model.named_buffers()}
    state |= {f"argument/{index}": argument for index, argument in enumerate(step.args)}
    return state
