"""Ops that stand in no table: at the least peak they give the plain numbers, or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError

import remat
from remat.measurement import measure
from remat.solvers.errors import CaptureError
from tests.models import beyond
from tests.models.beyond import BATCH, WIDTH, Block, Layer, Sandwich, Wrapped
from tests.models.compare import rounded
from tests.models.steps import same_bits

# What Dynamo itself does to autograd functions, and to inputs that are not leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]

CUSTOM = "is kept: remat_beyond.{}.default is a custom operator remat does not know"
IN_LINE = "nested_compile_region, forward and backward, are planned op by op"

# What stands in the middle, and what the plan's notes say of it ("" where there is nothing to say).
PLANNED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "custom op": (lambda: Layer(lambda x: x * beyond.twice(x.detach())), CUSTOM.format("twice")),
    "custom op with autograd": (lambda: Layer(lambda x: beyond.sine(x)), CUSTOM.format("sine")),
    "custom op that writes": (beyond.Counting, "auto_functionalized_v2 is not an operator"),
    "random custom op": (
        lambda: Layer(lambda x: x * beyond.noise(x.detach())),
        CUSTOM.format("noise"),
    ),
    "cond": (lambda: Layer(beyond.branches), ""),
    "cond with dropout": (
        lambda: Layer(beyond.random_branches),
        "cond is kept: cond draws random numbers in its body (aten.native_dropout.default)",
    ),
    "scan": (lambda: Layer(beyond.scanned), ""),
    "while_loop": (lambda: Layer(beyond.looped), ""),
    "map": (lambda: Layer(beyond.mapped), ""),
    "regions": (lambda: nn.Sequential(Block(), Block(), Block()), IN_LINE),
    "regions with dropout": (lambda: nn.Sequential(Block(0.5), Block(0.5)), IN_LINE),
    "autograd.Function": (lambda: Layer(lambda x: beyond.Doubling.apply(x) + x), ""),
    "wrapper subclass": (beyond.subclass_parameter, ""),
    "jagged": (lambda: Layer(beyond.jagged), ""),
    "8-bit weight": (beyond.QuantizedWeight, ""),
    "fake quantization": (lambda: Layer(beyond.fake_quantized), ""),
    "complex": (lambda: Layer(beyond.rotated), ""),
    "checkpoint with dropout": (beyond.Checkpointed, ""),
    "autocast": (lambda: Layer(beyond.half_precision), ""),
}

# What inductor draws is not what the plain model draws.
DRAWING = (
    "random custom op",
    "cond with dropout",
    "regions with dropout",
    "checkpoint with dropout",
)

# Inductor itself compiles no scan: its loop reads an index out of a fake tensor.
UNCOMPILED = ("scan", "map")

# What Dynamo breaks the graph at: several graphs are planned or refused, never run past the budget.
BREAKING: dict[str, Callable[[Any], Any]] = {
    "disabled": beyond.disabled,
    "sparse": beyond.sparse,
}


def outcome(
    middle: Callable[[], nn.Module], plan: bool, executor: str = "eager"
) -> tuple[dict[str, Any], Any]:
    """What one step leaves behind, and its plan."""
    torch.manual_seed(3)
    model, x = Sandwich(middle()), torch.randn(BATCH, WIDTH)
    options: dict[str, Any] = {
        "executor": executor,
        "time_limit": 0.3,
        "on_unplanned": "ignore",
    }
    run = remat.compile(model, memory_budget=0.0, **options) if plan else model
    torch.manual_seed(4)
    loss = run(x)
    loss.backward()
    left: dict[str, Any] = {"loss": loss.detach(), "rng": torch.get_rng_state()}
    left |= {f"buffer/{name}": buffer.clone() for name, buffer in model.named_buffers()}
    left |= {f"gradient/{name}": p.grad for name, p in model.named_parameters()}
    left = {k: v.inner if isinstance(v, Wrapped) else v for k, v in left.items()}
    return left, run.plans[0] if plan else None


@pytest.mark.parametrize("name", PLANNED)
def test_the_least_peak_gives_the_plain_numbers_and_says_what_is_kept(name: str) -> None:
    middle, note = PLANNED[name]
    plain, _ = outcome(middle, plan=False)
    torch._dynamo.reset()
    planned, plan = outcome(middle, plan=True)
    assert plain.keys() == planned.keys()
    assert [key for key in plain if not same_bits(plain[key], planned[key])] == []
    notes = "\n".join(plan.notes)
    assert note in notes
    assert ("is kept:" in notes) == ("kept" in note or "not an operator" in note)
    computes = plan.solution.schedule.computes
    assert len(set(computes)) < len(computes)  # there was something to recompute


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["inductor"])
@pytest.mark.parametrize("name", [name for name in PLANNED if name not in (*DRAWING, *UNCOMPILED)])
def test_the_least_peak_under_inductor_gives_the_plain_numbers(name: str, executor: str) -> None:
    middle, _ = PLANNED[name]
    plain, _ = outcome(middle, plan=False)
    torch._dynamo.reset()
    planned, _ = outcome(middle, plan=True, executor=executor)
    assert rounded(plain, planned) == []


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["inductor"])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_inductor_cannot_compile_is_its_own_error(name: str, executor: str) -> None:
    middle, _ = PLANNED[name]
    with pytest.raises(InductorError) as stock:
        torch.compile(Sandwich(middle()))(torch.randn(BATCH, WIDTH))
    torch._dynamo.reset()
    with pytest.raises(InductorError) as ours:
        outcome(middle, plan=True, executor=executor)
    assert str(ours.value) == str(stock.value)


@pytest.mark.matrix
@pytest.mark.parametrize("executor", ["inductor"])
@pytest.mark.parametrize("middle", [beyond.branches, beyond.looped, beyond.nested_branches])
@pytest.mark.parametrize("memory_budget", [0.0, 0.5])
def test_the_peak_of_a_branch_is_at_most_the_replayed_one(
    middle: Callable[[Tensor], Tensor], memory_budget: float, executor: str
) -> None:
    seen = set()

    model, x = Sandwich(Layer(middle)), torch.randn(BATCH, WIDTH)
    bias = model.first[-1].bias
    run = remat.compile(model, memory_budget=memory_budget, executor=executor, time_limit=0.3)
    for shift in (10.0, -10.0, 1000.0) * 2:
        with torch.no_grad():
            bias.fill_(shift)
        seen.add(bool(model.first(x).sum() > 0))

        def step() -> None:
            run(x).backward()
            model.zero_grad()

        measured = measure(step, resident=(model, x))
        plan = run.plans[-1]
        assert measured.graph <= plan.peak - plan.problem.fixed_bytes
    assert seen == {True, False}


@pytest.mark.parametrize("name", BREAKING)
def test_a_graph_break_gives_the_plain_numbers_or_is_refused_in_words(name: str) -> None:
    plain, _ = outcome(lambda: Layer(BREAKING[name]), plan=False)
    torch._dynamo.reset()
    refused = ""
    try:
        planned, _ = outcome(lambda: Layer(BREAKING[name]), plan=True)
    except CaptureError as error:
        refused = str(error)
    if refused:
        assert re.search(r"more than one graph: .*torch", refused)
    else:
        assert [key for key in plain if not same_bits(plain[key], planned[key])] == []


def test_an_effect_that_torch_orders_is_refused_in_words() -> None:
    with pytest.raises(CaptureError, match="print has an effect that torch orders by tokens"):
        outcome(lambda: Layer(beyond.printing), plan=True)


def test_flex_attention_trains_on_no_cpu_and_torch_says_so() -> None:
    for plan in (False, True):
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            outcome(lambda: Layer(beyond.flexible), plan=plan)


def test_a_pure_higher_order_op_is_among_what_is_computed_again() -> None:
    _, plan = outcome(lambda: Layer(lambda x: beyond.branches(x).sin() * x), plan=True)
    ops = plan.problem.ops
    again = [op for op in ops if op.target == "cond" and op.phase != "backward"]
    assert again
    assert all(op.rerunnable for op in again)


def test_ops_of_a_region_bear_the_modules_of_their_call() -> None:
    _, plan = outcome(lambda: nn.Sequential(Block(), Block()), plan=True)
    layers = {op.layer for op in plan.problem.ops}
    assert {"middle.0.up", "middle.1.up", "middle.1.down"} <= layers
