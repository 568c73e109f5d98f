"""Training loops as people write them: the numbers, the buffers and the random states are those of
the plain model, bit for bit. What a model returns, and its hooks: ``test_loops_outputs.py``.
"""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import RematError
from remat.plans import Plan, Unplanned
from tests.models.compare import EXECUTORS, Outcome
from tests.models.loops import WIDTH, Residual, Run, batch, check, planned

pytestmark = pytest.mark.parametrize("executor", EXECUTORS)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def test_several_forwards_before_one_backward(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        total = sum(run(batch(i)).square().mean() * (i + 1) for i in range(3))
        total.backward()
        first, second = run(batch(5)), run(batch(6))
        second.sum().backward()
        first.sum().backward()

    # A compiled call adds up what its own uses of a weight give before other calls' is added.
    check(Residual, body, executor, stock=True)


def test_several_backwards_through_one_forward(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        y = run(batch(1))
        for _ in range(3):
            y.square().sum().backward(retain_graph=True)
        y.sum().backward()

    check(Residual, body, executor)


def test_a_backward_too_many_is_torchs_own_error(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        loss = run(batch(1)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        run(batch(2)).sum().backward()

    check(Residual, body, executor)


def test_gradients_of_some_parameters_and_of_inputs(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        x = batch(1).requires_grad_()
        some = [model.layers[1].weight, x]
        outcome["gradients"] = torch.autograd.grad(run(x).square().sum(), some)
        outcome["again"] = torch.autograd.grad(run(x).sum(), [x])
        y = run(x)
        torch.autograd.backward([y], [batch(9)], inputs=some[:1])
        torch.autograd.backward([run(x)], [torch.ones(1, WIDTH).expand(6, WIDTH)])
        outcome["input"] = x.grad

    check(Residual, body, executor)


def penalty(model: nn.Module, run: Run, outcome: Outcome) -> None:
    x = batch(1).requires_grad_()
    (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    outcome["penalty"] = (g.norm(2, dim=1) - 1).square().mean()
    outcome["penalty"].backward()


def test_double_backward_is_refused_in_words(executor: str) -> None:
    torch.manual_seed(0)
    model = Residual()
    run = planned(model, executor)
    with pytest.raises(RematError, match="double_backward=True"):
        penalty(model, run, {})
    x = batch(1).requires_grad_()
    (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)  # and no further
    assert first.requires_grad
    run(x).sum().backward()


def test_double_backward_runs_uncompiled_if_asked_for(executor: str) -> None:
    run = check(Residual, penalty, executor, double_backward=True)
    assert isinstance(run.plans[0], Unplanned)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(executor: str, set_to_none: bool) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = sgd(model)
        for step in range(2):
            for micro in range(3):
                (run(batch(10 * step + micro)).square().mean() / 3).backward()
            outcome[f"norm{step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        run(batch(99)).sum().backward()

    check(Residual, body, executor)


# What Dynamo does to an input that is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_two_adversaries_take_turns(executor: str) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Residual(), Residual(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.generator(x)

    def both(model: nn.Module, generate: Run, judge: Run, outcome: Outcome) -> None:
        optimizers = sgd(model.generator), sgd(model.critic)
        for step in range(2):
            fake = generate(batch(step))
            optimizers[1].zero_grad()
            (judge(fake.detach()).mean() - judge(batch(50 + step)).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = -judge(fake).mean()
            loss.backward()
            optimizers[0].step()
            outcome[f"loss{step}"] = loss

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        if run is model:
            both(model, model.generator, model.critic, outcome)
        else:
            both(model, run, planned(model.critic, executor), outcome)

    check(Pair, body, executor)


def test_evaluation_between_training_steps(executor: str) -> None:
    class Normed(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.batch_norm(super().forward(x))

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = sgd(model)
        modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)
        for step, mode in enumerate(modes):
            model.train()
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
            model.eval()
            with mode():
                outcome[f"eval{step}"] = run(batch(40)).detach().clone()
        model.train()
        with torch.no_grad():
            outcome["train without gradients"] = run(batch(41))
        run(batch(9)).square().mean().backward()

    check(Normed, body, executor)


def test_changing_batch_sizes(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        for size in (6, 3, 1, 6):
            run(batch(size, size, WIDTH)).square().mean().backward()

    run = check(Residual, body, executor)
    assert len([plan for plan in run.plans if isinstance(plan, Plan)]) == 3


def test_freezing_and_unfreezing_between_steps(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = sgd(model)
        for frozen in (0, 1, None, 0):
            for index, layer in enumerate(model.layers):
                layer.requires_grad_(index != frozen)
            optimizer.zero_grad()
            run(batch(1)).square().sum().backward()
            optimizer.step()
        model.requires_grad_(False)
        outcome["all frozen"] = run(batch(2)).requires_grad

    check(Residual, body, executor)


def test_a_frozen_network_passes_the_gradient_on(executor: str) -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.base = nn.Parameter(torch.zeros(WIDTH)), Residual()
            self.base.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x + self.prompt)

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).square().sum().backward()

    check(Prompted, body, executor)


@pytest.mark.parametrize("scaled", [False, True])
def test_autocast(executor: str, scaled: bool) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome, halved: bool = True) -> None:
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        for step in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halved):
                loss = run(batch(step)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            outcome[f"loss{step}"] = loss
        outcome["scale"] = scaler.get_scale()

    check(Residual, body, executor, exact=partial(body, halved=False))


def test_backward_inside_autocast(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome, halved: bool = True) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=halved):
            run(batch(1)).float().square().mean().backward()

    check(Residual, body, executor, exact=partial(body, halved=False))


def test_draws_of_the_caller_between_forward_and_backward(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        y = run(batch(1))
        outcome["between"] = torch.rand(3)
        torch.manual_seed(11)
        y.square().sum().backward()
        outcome["after"] = torch.rand(3)

    check(Residual, body, executor)


def test_an_exception_in_forward_leaves_nothing_behind(executor: str) -> None:
    class Picky(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if x.shape[0] == 5:
                raise ValueError("five is not allowed")
            return y

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).sum().backward()
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="five is not allowed"):
            run(batch(1, 5, WIDTH))
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
            run(batch(1, 6, WIDTH + 1))
        torch.set_rng_state(state)  # the plain model had drawn before it raised
        run(batch(2)).sum().backward()

    check(Picky, body, executor)


def test_an_exception_in_backward_leaves_nothing_behind(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        def fail(gradient: Tensor) -> None:
            raise ValueError("from a hook")

        y = run(batch(1))
        y.register_hook(fail)
        with pytest.raises(ValueError, match="from a hook"):
            y.sum().backward()
        handle = model.layers[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="from a hook"):
            run(batch(1)).sum().backward()
        handle.remove()
        model.zero_grad()
        run(batch(2)).sum().backward()

    check(Residual, body, executor)


def test_a_step_between_forward_and_backward_is_refused_by_torch(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = sgd(model)
        run(batch(1)).sum().backward()
        y = run(batch(2))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        optimizer.zero_grad()
        run(batch(3)).sum().backward()

    check(Residual, body, executor)


def test_averaged_copies_and_loaded_states(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = sgd(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        start = copy.deepcopy(model.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            if step == 1:
                model.load_state_dict(start)
        outcome["average"] = dict(average.module.state_dict())
        model.load_state_dict(start, assign=True)
        run(batch(5)).square().mean().backward()

    check(Residual, body, executor)


def test_another_dtype_from_one_step_to_the_next(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).sum().backward()
        model.zero_grad()
        model.double()
        run(batch(2).double()).sum().backward()

    check(Residual, body, executor)


def test_an_optimizer_that_steps_inside_backward(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            steps[parameter].step()
            steps[parameter].zero_grad()

        for parameter in steps:
            parameter.register_post_accumulate_grad_hook(step)
        for index in range(2):
            run(batch(index)).square().mean().backward()

    check(Residual, body, executor)


def test_a_compiler_reset_in_the_middle(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        y = run(batch(1))
        torch._dynamo.reset()
        y.square().sum().backward()
        run(batch(2)).square().sum().backward()

    check(Residual, body, executor)


def test_backward_on_another_thread(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        loss = run(batch(1)).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    check(Residual, body, executor)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_caller_checkpoints_the_planned_model(executor: str, reentrant: bool) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        x = batch(1).requires_grad_()
        checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
        outcome["input"] = x.grad

    check(Residual, body, executor)


def test_detecting_anomalies(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).sum().backward()
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            run(batch(2)).sum().backward()

    check(Residual, body, executor)


def test_generation_between_training_steps(executor: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )

    def body(model: Any, run: Any, outcome: Outcome) -> None:
        ids = torch.randint(2, 20, (2, 6), generator=torch.Generator().manual_seed(1))
        for step in range(2):
            logits = run(ids).logits
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            model.eval()
            outcome[f"text{step}"] = run.generate(ids, max_new_tokens=3, do_sample=True)
            model.train()

    check(lambda: transformers.GPT2LMHeadModel(config), body, executor)
