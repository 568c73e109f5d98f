"""Several graphs in a step share one budget, from the second step on, in measured bytes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.backend import plans_of, step_plan_of
from remat.graphs import GraphRunner
from remat.measurement import resident_bytes
from remat.passes.allocations import Allocations
from remat.passes.torch_private import profiling
from remat.plans import Plan, Unplanned
from remat.sequences import Sequences
from remat.session import UnplannedWarning
from remat.solvers.errors import BudgetTooSmall, CaptureError, InvalidOption
from tests.remat.broken import Block, Broken, gradients

pytestmark = [
    # What Dynamo itself does when it resumes with an input that is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]

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
    return torch.randn(512, 64)


def true_peak(model: nn.Module, resident: object, step: Callable[[], object]) -> int:
    model.zero_grad(set_to_none=True)
    before = resident_bytes((model, resident))
    with Allocations() as watch:
        step()
    return before + watch.peak


def check(
    model: nn.Module, plain: Callable[[], Tensor], planned: Callable[[], Tensor], resident: object
) -> int:
    """Three steps with the plain model's gradients, then the true peak of one more."""
    expected = gradients(model, lambda: plain().backward())
    for _ in range(3):
        ours = gradients(model, lambda: planned().backward())
        assert len(ours) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    return true_peak(model, resident, lambda: planned().backward())


@pytest.mark.parametrize("memory_budget", [0.0, 0.5])
def test_two_graphs_share_the_budget(x: Tensor, memory_budget: float) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=memory_budget, **OPTIONS)
    peak = check(net, lambda: net(x), lambda: step(x), x)
    whole = step.step_plan
    assert whole is not None
    assert len(whole.plans) == len(step.plans) == 2
    assert peak <= whole.memory_budget
    assert whole.least_peak <= whole.memory_budget < whole.baseline_peak
    assert peak > 0.8 * whole.peak  # what is beside the graphs is measured, not guessed


def test_the_budget_holds_in_the_second_step(x: Tensor) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=0.5, **OPTIONS)
    gradients(net, lambda: step(x).backward())
    peak = true_peak(net, x, lambda: step(x).backward())
    assert step.step_plan is not None
    assert peak <= step.step_plan.memory_budget


def test_bytes_are_for_the_whole_step(x: Tensor) -> None:
    net = Broken()
    probe = remat.compile(net, memory_budget=0.0, **OPTIONS)
    check(net, lambda: net(x), lambda: probe(x), x)
    whole = probe.step_plan
    assert whole is not None
    budget = (whole.peak + whole.baseline_peak) // 2
    step = remat.compile(net, memory_budget=budget, **OPTIONS)
    assert check(net, lambda: net(x), lambda: step(x), x) <= budget
    assert step.step_plan.extra_time < whole.extra_time
    roomy = remat.compile(net, memory_budget=whole.baseline_peak * 2, **OPTIONS)
    check(net, lambda: net(x), lambda: roomy(x), x)
    assert [plan.solution.solver for plan in roomy.plans] == ["baseline"] * 2
    assert roomy.step_plan.extra_time == 0


def test_a_budget_nothing_fits_in_names_the_whole_step(x: Tensor) -> None:
    net = Broken()
    probe = remat.compile(net, memory_budget=0.0, **OPTIONS)
    check(net, lambda: net(x), lambda: probe(x), x)
    least = probe.step_plan.least_peak
    step = remat.compile(net, memory_budget=least - 150_000, **OPTIONS)
    gradients(net, lambda: step(x).backward())
    with pytest.raises(BudgetTooSmall, match="whole step, several graphs together") as caught:
        gradients(net, lambda: step(x).backward())
    assert caught.value.memory_budget == least - 150_000
    assert caught.value.least_peak == pytest.approx(least, rel=0.02)


def test_a_graph_without_layers_is_left_as_it_is_by_every_n_layers(x: Tensor) -> None:
    class WithHead(Broken):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            torch._dynamo.graph_break()
            return x.sin().square().mean()

    net = WithHead()
    step = remat.compile(net, every_n_layers=2, **OPTIONS)
    check(net, lambda: net(x), lambda: step(x), x)
    layered, head = step.plans
    assert layered.solution.solver == "every_n_layers"
    assert head.solution.solver == "baseline"
    assert any("every_n_layers" in note for note in head.notes)


def test_what_generated_code_takes_more_is_given_room(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that takes 100,000 bytes more than planned, and then no more."""
    net = Broken()
    probe = remat.compile(net, memory_budget=0.0, **OPTIONS)
    check(net, lambda: net(x), lambda: probe(x), x)
    budget = probe.step_plan.least_peak + 200_000
    monkeypatch.setattr(GraphRunner, "excess", lambda runner, plan: 100_000)
    step = remat.compile(net, memory_budget=budget, **OPTIONS)
    with pytest.warns(UnplannedWarning, match="call 2 of this step takes .* more than planned"):
        peak = check(net, lambda: net(x), lambda: step(x), x)
    assert step.step_plan.peak <= budget
    assert peak <= budget - 100_000


def test_generated_code_that_always_takes_more_is_refused(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Broken()
    probe = remat.compile(net, memory_budget=0.0, **OPTIONS)
    check(net, lambda: net(x), lambda: probe(x), x)
    budget = 2 * probe.step_plan.least_peak
    monkeypatch.setattr(GraphRunner, "excess", lambda runner, plan: 1000)
    monkeypatch.setattr(Sequences, "over", lambda sequences, plan, excess: 17)
    step = remat.compile(net, memory_budget=budget, **OPTIONS)
    gradients(net, lambda: step(x).backward())
    with pytest.raises(BudgetTooSmall, match="in 5 compilations") as caught:
        gradients(net, lambda: step(x).backward())
    assert caught.value.least_peak == budget + 17


def test_what_stands_between_the_graphs_is_measured(x: Tensor) -> None:
    class Between(Broken):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            x = self.outside(x)
            return self.blocks[3](self.blocks[2](x)).square().mean()

        @torch.compiler.disable
        def outside(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.sigmoid(x) + x  # holds what backward needs
            return x

    net = Between()
    step = remat.compile(net, memory_budget=0.3, **OPTIONS)
    peak = check(net, lambda: net(x), lambda: step(x), x)
    whole = step.step_plan
    assert peak <= whole.memory_budget
    assert peak > 0.8 * whole.peak
    assert whole.eager_peak > 0
    held = 4 * x.untyped_storage().nbytes()
    assert max(phase.beside for phase in whole.joined.phases if phase.call == 1) >= held
    assert "eager" in str(whole)


def test_a_break_in_a_loop_leaves_one_graph_called_many_times(x: Tensor) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.log: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                self.log.append(x.mean().item())
            return x.square().mean()

    net = Loop()
    step = remat.compile(net, memory_budget=0.3, **OPTIONS)
    peak = check(net, lambda: net(x), lambda: step(x), x)
    whole = step.step_plan
    assert len(whole.plans) >= 4
    assert peak <= whole.memory_budget


def test_blocks_compiled_one_by_one_share_an_options_object(x: Tensor) -> None:
    net = nn.Sequential(*(Block() for _ in range(4)))
    options = {"memory_budget": 0.3, **OPTIONS}
    twin = nn.Sequential(*(Block() for _ in range(4)))
    twin.load_state_dict(net.state_dict())
    for block in net:
        block.compile(backend="remat", options=options, dynamic=False)
    expected = gradients(twin, lambda: twin(x).square().mean().backward())
    for _ in range(3):
        ours = gradients(net, lambda: net(x).square().mean().backward())
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    peak = true_peak(net, x, lambda: net(x).square().mean().backward())
    whole = step_plan_of(options)
    assert len(whole.plans) == 4
    assert peak <= whole.memory_budget
    assert all(isinstance(plan, Plan) for plan in plans_of(options))
    with pytest.raises(InvalidOption, match="an equal one is another"):
        plans_of(dict(options))


def test_a_changed_sequence_is_said_and_planned(x: Tensor) -> None:
    block = Block()
    step = remat.compile(block, memory_budget=0.3, **OPTIONS)

    def times(count: int) -> Callable[[], None]:
        def run() -> None:
            y = x
            for _ in range(count):
                y = step(y)
            y.square().mean().backward()

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedWarning)
        for _ in range(3):
            gradients(block, times(3))
        gradients(block, times(2))  # fewer wait at every moment: covered
    assert len(step.step_plan.plans) == 3
    with pytest.warns(UnplannedWarning, match="sequence of graph calls changed at call 4"):
        gradients(block, times(5))
    gradients(block, times(5))
    assert len(step.step_plan.plans) == 5
    assert true_peak(block, x, times(5)) <= step.step_plan.memory_budget
    strict = remat.compile(block, memory_budget=0.3, on_unplanned="raise", **OPTIONS)
    step = strict
    for _ in range(2):
        gradients(block, times(2))
    with pytest.raises(CaptureError, match="sequence of graph calls changed"):
        times(3)()


def test_layers_dropped_at_random_settle(x: Tensor) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                if index and random.random() < 0.4:
                    continue
                x = block(x)
                torch._dynamo.graph_break()
            return x.square().mean()

    net = Dropping()
    step = remat.compile(net, memory_budget=0.3, on_unplanned="ignore", **OPTIONS)
    for seed in range(8):
        random.seed(seed)
        expected = gradients(net, lambda: net(x).backward())
        random.seed(seed)
        ours = gradients(net, lambda: step(x).backward())
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_gradients_that_are_there_already(x: Tensor) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=0.3, **OPTIONS)
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        for _ in range(3):
            step(x).backward()
    held = resident_bytes((net, x))
    with Allocations() as watch:
        step(x).backward()
    assert held + watch.peak <= step.step_plan.memory_budget


def test_a_graph_that_does_not_train_is_shown_so(x: Tensor) -> None:
    class Frozen(Broken):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](x)
                torch._dynamo.graph_break()
            return self.blocks[2](x).square().mean()

    net = Frozen()
    step = remat.compile(net, memory_budget=0.3, on_unplanned="ignore", **OPTIONS)
    for _ in range(3):
        step(x).backward()
    assert any(isinstance(plan, Unplanned) for plan in step.plans)
    assert any(isinstance(plan, Plan) for plan in step.plans)


def test_without_a_budget_nothing_is_touched(x: Tensor) -> None:
    net = Broken()
    step = remat.compile(net, executor="eager")
    for _ in range(2):
        step(x).backward()
    assert step.step_plan is None
    assert [plan.solution.solver for plan in step.plans] == ["baseline"] * 2


def test_a_call_that_is_never_followed_by_a_backward_ends_the_recording(x: Tensor) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=0.5, **OPTIONS)
    step(x)
    step(x).backward()
    step(x).backward()
    assert step.step_plan is not None


@pytest.mark.slow
def test_a_hugging_face_model_called_with_labels() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    net = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 256, (8, 64))
    step = remat.compile(net, memory_budget=0.3, **OPTIONS)

    def loss(run: Callable[..., Any]) -> Tensor:
        torch.manual_seed(1)  # dropout
        return run(input_ids=tokens, labels=tokens).loss

    peak = check(net, lambda: loss(net), lambda: loss(step), tokens)
    whole = step.step_plan
    assert len(whole.plans) == 2
    assert peak <= whole.memory_budget < whole.baseline_peak


def test_backwards_need_not_be_nested(x: Tensor) -> None:
    block = Block()
    step = remat.compile(block, memory_budget=0.3, **OPTIONS)

    def both(run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def train() -> None:
            first, second = run(x).square().mean(), run(x * 2).square().mean()
            first.backward()
            second.backward()

        return train

    expected = gradients(block, both(block))
    for _ in range(3):
        ours = gradients(block, both(step))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    whole = step.step_plan
    assert [phase.call for phase in whole.joined.phases if phase.kind == "backward"] == [0, 1]
    assert true_peak(block, x, both(step)) <= whole.memory_budget


def test_a_graph_that_is_kept_for_a_second_backward_still_has_its_gradients(x: Tensor) -> None:
    net = Broken()
    step = remat.compile(net, memory_budget=0.3, on_unplanned="ignore", **OPTIONS)

    def twice(run: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def train() -> None:
            loss = run(x)
            loss.backward(retain_graph=True)
            loss.backward()

        return train

    expected = gradients(net, twice(net))
    for _ in range(3):
        ours = gradients(net, twice(step))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_an_error_in_the_middle_leaves_a_model_that_still_trains(x: Tensor) -> None:
    class Failing(Broken):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            self.outside()
            return self.blocks[3](self.blocks[2](x)).square().mean()

        @torch.compiler.disable
        def outside(self) -> None:
            if self.fails:
                raise RuntimeError("in the middle")

    net = Failing()
    step = remat.compile(net, memory_budget=0.3, **OPTIONS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"):
            step(x)
        assert not profiling.is_profiling()
    net.fails = False
    assert check(net, lambda: net(x), lambda: step(x), x) <= step.step_plan.memory_budget
