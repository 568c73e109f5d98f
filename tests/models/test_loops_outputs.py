"""What a model returns, what it keeps, and who watches it: as with the plain model, bit for bit."""

from __future__ import annotations

from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.compare import EXECUTORS, Outcome, differences, rounded
from tests.models.loops import (
    WIDTH,
    Residual,
    Run,
    batch,
    check,
    planned,
    trained,
    trained_by_inductor,
)

pytestmark = pytest.mark.parametrize("executor", EXECUTORS)

Pair = namedtuple("Pair", ("y", "h"))


@dataclass
class Result:
    y: Tensor
    hidden: tuple[Tensor, ...] = ()
    note: str = ""


class Returning(Residual):
    """Returns what the function given makes of (input, hidden, output)."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        hidden = torch.sigmoid(self.layers[0](x))
        return self.make(x, hidden, super().forward(hidden))


CONTAINERS = {
    "dict": lambda x, h, y: {"y": y, "h": h},
    "nested": lambda x, h, y: [y, {"h": (h, [None, 3])}],
    "named": lambda x, h, y: Pair(y, h),
    "dataclass": lambda x, h, y: Result(y, (h, h), note="two"),
    "twice": lambda x, h, y: (y, y, h, y),
    "views": lambda x, h, y: (y.t(), y[:, 0], y.view(-1), h),
    "integers": lambda x, h, y: (y, y.argmax(-1), 7, h),
    "detached": lambda x, h, y: (y, h, y.detach()),
}


def leaves(result: Any) -> list[Tensor]:
    if isinstance(result, Result):
        result = (result.y, result.hidden)
    flat, _ = torch.utils._pytree.tree_flatten(result)
    return [item for item in flat if isinstance(item, Tensor)]


@pytest.mark.parametrize("name", CONTAINERS)
def test_outputs_of_every_form(executor: str, name: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        result = run(batch(1))
        outcome["type"] = type(result).__name__
        found = leaves(result)
        outcome["outputs"] = [t.detach().clone() for t in found]
        outcome["trains"] = [t.requires_grad for t in found]
        sum(t.square().sum() * (i + 1) for i, t in enumerate(found) if t.requires_grad).backward()

    # Gradients of the views of one output are added up in another order.
    check(lambda: Returning(CONTAINERS[name]), body, executor, stock=name in ("views", "twice"))


def test_outputs_that_alias_inputs_and_parameters(executor: str) -> None:
    class Aliasing(Residual):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x, x.view(-1), self.layers[0].weight, x[1:]

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        x = batch(1)
        y, same, flat, weight, rows = run(x)
        outcome["same"] = [same is x, weight is model.layers[0].weight]
        outcome["storage"] = [t.data_ptr() - x.data_ptr() for t in (same, flat, rows)]
        (y.sum() + weight.square().sum()).backward()
        with torch.no_grad():
            flat.zero_()
        outcome["rows"] = rows.clone()

    check(Aliasing, body, executor)


def test_writing_into_an_output_before_backward(executor: str) -> None:
    class Linear(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](super().forward(x))

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        y = run(batch(1))
        y.mul_(2).add_(1)
        y.square().sum().backward()

    check(Linear, body, executor)


def test_a_write_into_what_backward_needs_is_never_silent(executor: str) -> None:
    """An output that only the plan saves: the plain model would get by, the planned one says so."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return (h + 1).sin() * (h + 2).cos(), h

    torch.manual_seed(0)
    model = Shared()
    run = planned(model, executor)
    y, h = run(batch(1))
    with torch.no_grad():
        h.mul_(3)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        found = model.first.weight.grad
        model.zero_grad()
        model(batch(1))[0].sum().backward()
        compared = differences if executor == "eager" else rounded
        assert compared({"gradient": model.first.weight.grad}, {"gradient": found}) == []


def test_an_input_that_forward_writes_into(executor: str) -> None:
    class Writing(Residual):
        def __init__(self) -> None:
            # Stock inductor gets this wrong, and nobody but the plain model is right to compare to.
            super().__init__(dropout=0.2 if executor == "eager" else 0.0)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            y = super().forward(x * state.sin())
            state.mul_(0.5).add_(y.detach().mean(0))
            return y * state.cos()

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        state = batch(3, WIDTH)
        first, second = run(batch(1), state), run(batch(2), state)
        outcome["state"] = state.clone()
        state.zero_()
        (first.sum() + 2 * second.square().sum()).backward()

    check(Writing, body, executor, stock=True)  # two forwards: see test_loops.py


def test_parameters_that_get_no_gradient(executor: str) -> None:
    """torch's compiled graphs give zeros where the plain model gives None; one that no graph reads
    keeps its None."""

    class Heads(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
            self.unread = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            h = super().forward(x)
            return [head(h) for head in self.heads]

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1))[0].sum().backward()
        outcome["unread"] = model.unread.grad is None

    check(Heads, body, executor, zero_is_none=True)


def test_hooks_fire_once(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        calls: Counter[str] = Counter()
        layer = model.layers[0]
        x = batch(1).requires_grad_()

        def double(gradient: Tensor) -> Tensor:
            calls["parameter"] += 1
            return gradient * 2

        layer.weight.register_hook(double)
        layer.bias.register_post_accumulate_grad_hook(lambda p: calls.update(["accumulated"]))
        x.register_hook(lambda g: calls.update(["input"]))
        y = run(x)
        y.retain_grad()
        y.register_hook(lambda g: calls.update(["output"]))
        y.grad_fn.register_prehook(lambda gs: calls.update(["node"]))
        y.square().sum().backward()
        outcome |= {"calls": dict(calls), "input": x.grad, "output": y.grad}

    check(Residual, body, executor)


def test_forward_hooks_of_modules_run_and_count_once(executor: str) -> None:
    def build() -> nn.Module:
        model = Residual()
        model.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def before(module: nn.Module, args: Any) -> Any:
            model.calls.add_(1)
            return (args[0] * 0.5,)

        model.layers[0].register_forward_pre_hook(before)
        model.layers[1].register_forward_hook(lambda module, args, out: out + 0.25)
        return model

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).square().sum().backward()
        outcome["calls"] = model.calls.clone()

    check(build, body, executor)


def test_a_hook_of_a_tensor_inside_the_model(executor: str) -> None:
    class Hooked(Residual):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.layers[0](x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
            return super().forward(h)

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).square().sum().backward()

    check(Hooked, body, executor)


def test_hooks_on_saved_tensors_see_all_and_restore_all(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(0)).square().sum().backward()
        counts = Counter({"packed": 0, "unpacked": 0})

        def pack(t: Tensor) -> tuple[Tensor, int]:
            counts["packed"] += 1
            return t.detach().clone(), t.dtype.itemsize

        def unpack(p: Any) -> Tensor:
            counts["unpacked"] += 1
            return p[0]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            first = run(batch(1))
            second = run(batch(2))  # asking whether the first still waits unpacks nothing
            assert counts["unpacked"] == 0
        (first + second).square().sum().backward()
        assert 0 < counts["packed"] == counts["unpacked"]

    check(Residual, body, executor, stock=True)


def normed(kind: str) -> nn.Module:
    model = Residual()
    model.layers[0] = {
        "spectral": parametrizations.spectral_norm,
        "weight": parametrizations.weight_norm,
        "orthogonal": parametrizations.orthogonal,
    }[kind](model.layers[0])
    return model


@pytest.mark.parametrize("kind", ["spectral", "weight"])
def test_parametrized_weights(executor: str, kind: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            outcome["eval"] = run(batch(9))
        model.train()
        run(batch(3)).square().mean().backward()

    check(lambda: normed(kind), body, executor)


def test_two_forwards_of_a_spectral_norm_before_backward(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        first, second = run(batch(1)), run(batch(2))
        (first.sum() * second.square().sum()).backward()

    check(lambda: normed("spectral"), body, executor, stock=True)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(executor: str, p: float) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).square().sum().backward()

    # At p = 1 torch's compiled graphs draw random numbers, and the plain model does not.
    check(lambda: Residual(dropout=p), body, executor, stock=p == 1.0)


def test_random_numbers_that_nobody_reads(executor: str) -> None:
    class Wasteful(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x * torch.rand(WIDTH)
            return super().forward(x)

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        run(batch(1)).square().sum().backward()

    # torch's compiled graphs drop them; the plain model's generator has moved further.
    check(Wasteful, body, executor, stock=True)
    if executor == "eager":
        plain, _ = trained(lambda: Wasteful(dropout=0.0), body, lambda model: model)
        found, _ = trained(
            lambda: Wasteful(dropout=0.0), body, lambda model: planned(model, executor)
        )
        assert differences(plain, found) == ["rng"]


def test_shared_weights_under_autocast(executor: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embedding(ids)
            h = h + torch.tanh(self.mix(torch.tanh(self.mix(h))))
            return nn.functional.linear(h, self.embedding.weight)

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        ids = torch.arange(12).view(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(ids)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
        outcome["loss"] = loss

    # The plain model keeps one cast of a shared weight and adds up its gradients in bfloat16.
    check(Tied, body, executor, stock=True)


def test_two_models_of_one_class_in_one_process(executor: str) -> None:
    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        other = Residual()
        other.layers[0].requires_grad_(False)
        plain = run is model
        runs = (run, other if plain else planned(other, executor, memory_budget=0.5))
        for step in range(2):
            (runs[0](batch(step)) * runs[1](batch(step)).detach()).sum().backward()
            runs[1](batch(step)).sum().backward()
        outcome |= {f"other/{n}": p.grad for n, p in other.named_parameters()}

    check(Residual, body, executor)


def test_python_arguments_that_change_the_graph(executor: str) -> None:
    class Switched(Residual):
        def forward(self, x: Tensor, scale: float = 1.0, skip: bool = False) -> Tensor:
            return x * scale if skip else super().forward(x) * scale

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        for scale, skip in ((1.0, False), (0.5, False), (1.0, True)):
            y = run(batch(1).requires_grad_(), scale, skip=skip)
            y.sum().backward()

    check(Switched, body, executor)


@pytest.mark.parametrize("door", ["function", "backend", "in place"])
def test_every_way_in(executor: str, door: str) -> None:
    given: dict[str, Any] = {"memory_budget": 0.0, "executor": executor, "cost": "flops"}
    given |= {"time_limit": 0.1, "on_unplanned": "ignore"}

    def enter(model: nn.Module) -> Any:
        if door == "function":
            return planned(lambda x: model(x).square().mean(), executor)
        if door == "in place":
            model.compile(backend="remat", options=given, dynamic=False)
            return lambda x: model(x).square().mean()
        compiled = torch.compile(model, backend="remat", options=given, dynamic=False)
        return lambda x: compiled(x).square().mean()

    def body(model: nn.Module, run: Run, outcome: Outcome) -> None:
        for step in range(2):
            outcome[f"loss{step}"] = run(batch(step))
            outcome[f"loss{step}"].backward()

    wanted, _ = trained(Residual, body, lambda model: lambda x: model(x).square().mean())
    found, _ = trained(Residual, body, enter)
    if executor == "inductor" and rounded(wanted, found):  # other random numbers
        wanted = trained_by_inductor(Residual, body, lambda x: x.square().mean())
    compared = differences if executor == "eager" else rounded
    assert compared(wanted, found) == []
