"""Training loops that went wrong elsewhere, plain and planned, bit by bit; each case says where."""

from __future__ import annotations

import importlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import remat
from tests.models.steps import same_bits

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py"))


def outcome_of(case: Any, memory_budget: float | None) -> dict[str, Any]:
    """What the case's steps return, and all they leave behind; None runs the plain model."""
    model, args, loss = case.build()
    run = model
    if memory_budget is not None:
        options = {"time_limit": 0.3, "on_unplanned": "ignore"}
        run = remat.compile(model, memory_budget=memory_budget, **options)
    torch.manual_seed(7)
    random.seed(7)
    if hasattr(case, "steps"):
        outcome: dict[str, Any] = dict(case.steps(model, run))
    else:
        outcome = {"loss": loss(run(*args))}
        outcome["loss"].backward()
    outcome["rng"] = torch.get_rng_state()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        outcome[f"value/{name}"] = tensor.detach().clone()
        outcome[f"gradient/{name}"] = None if tensor.grad is None else tensor.grad.clone()
    return outcome


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return same_bits(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


# What Dynamo itself does to autograd functions, and to inputs that are not leaves.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("memory_budget", [0.0, pytest.param(0.5, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_the_numbers_of_the_plain_model(name: str, memory_budget: float) -> None:
    case = importlib.import_module(f"tests.models.cases.{name}")
    plain, planned = outcome_of(case, None), outcome_of(case, memory_budget)
    assert plain.keys() == planned.keys()
    assert [key for key in plain if not same(plain[key], planned[key])] == []
