"""Training loops that went wrong elsewhere, plain and planned, bit by bit; each case says where.

A case that declares ``EXPECTED = "equal"`` leaves behind what the plain model leaves. One that
declares ``REFUSED`` raises a RematError with those words, and leaves a model that still trains.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import remat
from remat import RematError
from tests.models.compare import (
    CANCELLED,
    EXECUTORS,
    differences,
    inexact,
    left_behind,
    rounded,
    seed_everything,
)

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py"))
LARGER = [
    pytest.param(name, size, marks=pytest.mark.slow, id=f"{name}-{label}")
    for name in CASES
    for label, size in getattr(
        importlib.import_module(f"tests.models.cases.{name}"), "SIZES", {}
    ).items()
]
ALL_BUDGETS = ("multihead_partial_loss",)  # quick, and every budget had its own mistake elsewhere

# What Dynamo itself does to autograd functions, and to inputs that are not leaves; what torch says
# of .backward(create_graph=True).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.models.cases.{name}")


def compiled(model: Any, memory_budget: float, executor: str) -> Any:
    options = {"time_limit": 0.3, "on_unplanned": "ignore"}
    return remat.compile(model, memory_budget=memory_budget, executor=executor, **options)


def outcome_of(case: Any, prepare: Any, size: tuple[Any, ...] = ()) -> dict[str, Any]:
    """What the case's steps return, and all they leave behind, input gradients included."""
    torch._dynamo.reset()
    model, args, loss = case.build(*size)
    run = prepare(model)
    seed_everything()
    inputs = {f"argument{i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    if hasattr(case, "steps"):
        outcome: dict[str, Any] = dict(case.steps(model, run))
    else:
        outcome = {"loss": loss(run(*args))}
        outcome["loss"].backward()
    return {**outcome, **left_behind(model, **inputs)}


def plain(model: Any) -> Any:
    return model


def check(name: str, memory_budget: float, executor: str, size: tuple[Any, ...] = ()) -> None:
    case = load(name)
    if hasattr(case, "REFUSED"):
        check_refused(case, memory_budget, executor)
        return
    assert case.EXPECTED == "equal"
    found = outcome_of(case, lambda model: compiled(model, memory_budget, executor), size)
    wanted = outcome_of(case, plain, size)
    if executor == "eager":
        assert differences(wanted, found) == []
    elif rounded(wanted, found):
        stock = outcome_of(case, lambda model: torch.compile(model, dynamic=False), size)
        if not _draws(wanted):  # what inductor draws is not what the plain model draws
            assert rounded(wanted, stock, times=CANCELLED) == [], rounded(wanted, found)
        further = rounded(stock, found)
        if further and not _draws(wanted):  # where gradients cancel, float64 tells who is right
            exact = outcome_of(_in_float64(case), plain, size)
            further = [name for name in inexact(found, stock, exact) if name in further]
        assert further == []


def _in_float64(case: Any) -> Any:
    """The same case, its model and all it is given in float64."""

    def wide(item: Any) -> Any:
        return (
            item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        )

    def build(*size: Any) -> tuple[Any, tuple[Any, ...], Any]:
        model, args, loss = case.build(*size)
        return model.double(), tuple(wide(item) for item in args), loss

    def steps(model: Any, run: Any) -> Any:
        return case.steps(model, lambda *args, **kwargs: run(*map(wide, args), **kwargs))

    made = SimpleNamespace(build=build)
    if hasattr(case, "steps"):
        made.steps = steps
    return made


def _draws(outcome: dict[str, Any]) -> bool:
    seed_everything()
    return not torch.equal(outcome["rng"], torch.get_rng_state())


def check_refused(case: Any, memory_budget: float, executor: str) -> None:
    model, args, loss = case.build()
    before = left_behind(model)
    run = compiled(model, memory_budget, executor)
    with pytest.raises(RematError) as caught:
        case.steps(model, run) if hasattr(case, "steps") else run(*args)
    assert case.REFUSED in str(caught.value)
    after = left_behind(model)
    assert differences(before, {**after, "rng": before["rng"]}) == []
    loss(model(*args)).backward()  # the plain model trains on
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "memory_budget",
    [0.0, *(pytest.param(budget, marks=pytest.mark.matrix) for budget in (0.5, 1.0))],
)
@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_the_numbers_of_the_plain_model(
    name: str, memory_budget: float, executor: str
) -> None:
    check(name, memory_budget, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("memory_budget", [0.5, 1.0])
@pytest.mark.parametrize("name", ALL_BUDGETS)
def test_a_quick_case_at_every_budget(name: str, memory_budget: float, executor: str) -> None:
    check(name, memory_budget, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("name", "size"), LARGER)
def test_a_case_in_full_size(name: str, size: tuple[Any, ...], executor: str) -> None:
    check(name, 0.0, executor, size)


def test_every_case_says_what_is_expected_of_it() -> None:
    for name in CASES:
        case = load(name)
        assert hasattr(case, "EXPECTED") != hasattr(case, "REFUSED"), name
        assert "Source:" in case.__doc__, name
