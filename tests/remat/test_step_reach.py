"""What a step reads through other code, and what the names it uses come to mean, between calls."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import CaptureError
from remat.step_reach import reach

KNOB = 1.0
Case = tuple[Callable[..., Any], Callable[[int], None]]


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def gradient(w: Tensor, by: Any) -> Tensor:
    return torch.autograd.grad((w * by).square().sum(), w)[0]


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Doubled(Squared):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Base:
    def __init__(self) -> None:
        self.w, self.k = parameter(), 1.0

    def step(self) -> Tensor:
        return gradient(self.w, self.k)


class Derived(Base):
    def step(self) -> Tensor:
        return super().step() * 2


class Called(Base):
    def __call__(self) -> Tensor:
        return self.step()


class Asked(Base):
    def step(self) -> Tensor:
        return gradient(self.w, getattr(self, "k"))  # noqa: B009


class InSlots:
    __slots__ = ("k", "w")

    def __init__(self) -> None:
        self.w, self.k = parameter(), 1.0

    def step(self) -> Tensor:
        return gradient(self.w, self.k)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter()

    def forward(self) -> Tensor:
        return (self.w * KNOB).square().sum()


def attribute(make: Callable[[], Any], method: str = "step") -> Case:
    held = make()
    return getattr(held, method), lambda n: setattr(held, "k", float(n))


def partial_step() -> Case:
    w, box = parameter(), {"k": 1.0}
    return functools.partial(lambda w, box: gradient(w, box["k"]), w, box), lambda n: box.update(
        k=float(n)
    )


def knob_of_a_forward() -> Case:
    module = Reads()

    def step() -> Tensor:
        module.zero_grad()
        module().backward()
        assert module.w.grad is not None
        return module.w.grad

    def change(n: int) -> None:
        global KNOB
        KNOB = float(n)

    return step, change


def function_in_a_dict() -> Case:
    w, k = parameter(), 1.0
    table = {"loss": lambda: k}

    def change(n: int) -> None:
        nonlocal k
        k = float(n)

    return lambda: gradient(w, table["loss"]()), change


def function_of_a_module() -> Case:
    helpers, w = ModuleType("helpers_of_a_test"), parameter()
    exec("K = 1.0\ndef scale():\n    return K", vars(helpers))
    return lambda: gradient(w, helpers.scale()), lambda n: setattr(helpers, "K", float(n))


def hook() -> Case:
    model, k = nn.Linear(2, 1), 1.0
    model.register_forward_hook(lambda module, given, output: output * k)

    def change(n: int) -> None:
        nonlocal k
        k = float(n)

    return lambda: torch.autograd.grad(model(torch.ones(1, 2)).sum(), model.weight)[0], change


def another_module() -> Case:
    nets = [nn.Linear(2, 1), nn.Linear(2, 1)]
    which = nets[0]

    def step() -> Any:
        weights = [p for net in nets for p in net.parameters()]
        loss = which(torch.ones(1, 2)).sum() + sum(p.square().sum() for p in weights)
        return torch.autograd.grad(loss, weights)

    def change(n: int) -> None:
        nonlocal which
        which = nets[n % 2]

    return step, change


def swapped_children() -> Case:
    model: Any = nn.Module()
    model.a, model.b = nn.Linear(2, 1), nn.Linear(2, 1)
    model.use = model.a

    def step() -> Any:
        model.zero_grad()
        loss = model.use(torch.ones(1, 2)).sum()
        loss.backward()
        return [loss, *(p.grad for p in model.use.parameters())]

    return step, lambda n: setattr(model, "use", (model.a, model.b)[n % 2])


def nested_lists() -> Case:
    w, groups = parameter(), [[1.0, 2.0], [3.0]]

    def change(n: int) -> None:
        groups[:] = [[1.0], [2.0, 3.0]] if n % 2 else [[1.0, 2.0], [3.0]]

    return lambda: gradient(w, sum(groups[0])), change


def another_mode() -> Case:
    w, mode = parameter(), Mode.ONE

    def change(n: int) -> None:
        nonlocal mode
        mode = Mode(n % 2 + 1)

    return lambda: gradient(w, 1.0 if mode is Mode.ONE else 2.0), change


def another_class() -> Case:
    w, function = parameter(), Squared

    def change(n: int) -> None:
        nonlocal function
        function = (Squared, Doubled)[n % 2]

    return lambda: torch.autograd.grad(function.apply(w).sum(), w)[0], change


class Forwards(nn.Module):
    def forward(self) -> Tensor:
        return (self.w * self.cfg.k).square().sum()


class Inherits(Forwards):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.cfg = parameter(), SimpleNamespace(k=1.0)
        self._private, self.table = SimpleNamespace(k=1.0), np.ones(3)

    def forward(self) -> Tensor:
        return super().forward() * self._private.k


def configured_module(private: bool) -> Case:
    module = Inherits()
    held = module._private if private else module.cfg
    return lambda: torch.autograd.grad(module(), module.w)[0], lambda n: setattr(
        held, "k", float(n)
    )


def method_of_an_object() -> Case:
    class Scale:
        k = 1.0

        def get(self) -> float:
            return self.k

    w, scale = parameter(), Scale()
    return lambda: gradient(w, scale.get()), lambda n: setattr(scale, "k", float(n))


def function_in_an_object() -> Case:
    w, held = parameter(), SimpleNamespace(act=torch.sin)

    def step() -> Tensor:
        return torch.autograd.grad(held.act(w).sum(), w)[0]

    return step, lambda n: setattr(held, "act", (torch.exp, torch.sin)[n % 2])


def attributes_of_an_optimizer() -> Case:
    class Configured(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad, alpha=self.cfg["k"])

    w = parameter()
    optimizer: Any = Configured([w], lr=0.1)
    optimizer.cfg = {"k": 1.0}

    def step() -> Tensor:
        optimizer.zero_grad()
        w.square().sum().backward()
        with torch.no_grad():
            optimizer.step()
        return w.detach().clone()

    return step, lambda n: optimizer.cfg.update(k=float(n))


CASES: dict[str, Callable[[], Case]] = {
    "super": lambda: attribute(Derived), "callable": lambda: attribute(Called, "__call__"),
    "getattr": lambda: attribute(Asked), "slots": lambda: attribute(InSlots),
    "partial": partial_step, "forward": knob_of_a_forward, "dict": function_in_a_dict,
    "module": function_of_a_module, "hook": hook, "net": another_module,
    "children": swapped_children, "lists": nested_lists, "enum": another_mode,
    "class": another_class, "config": lambda: configured_module(False),
    "private": lambda: configured_module(True), "method": method_of_an_object,
    "act": function_in_an_object, "optimizer": attributes_of_an_optimizer,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_other_code_reads_is_read_anew(name: str) -> None:
    def run(planned: bool) -> list[Any]:
        torch.manual_seed(0)
        step, change = CASES[name]()
        step = remat.compile_step(step, cost="roofline") if planned else step
        seen = []
        for n in (1, 2, 2, 3):
            change(n)
            seen.append(torch.utils._pytree.tree_map(torch.clone, [step()]))
        return seen

    plain = run(False)
    torch.testing.assert_close(run(True), plain, rtol=0, atol=0)
    assert not torch.equal(_flat(plain[0]), _flat(plain[1]))  # the change shows


class Odd(Base):
    """What a step may name without harm, and is not asked."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.itself = 0.0, {}
        self.dead = weakref.proxy(parameter())

    @property
    def grad(self) -> Any:
        Odd.asked += 1
        raise RuntimeError("this is not for everybody")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} yet")

    def step(self) -> Tensor:
        found = gradient(self.w, 1.0)
        self.w.grad = found
        return found


loss: Any = None


def test_what_a_step_does_not_read_makes_no_other_graph() -> None:
    """Attributes it mentions are no globals; properties and lazy objects are left alone."""
    global loss
    odd, box = Odd(), SimpleNamespace(loss=1.0)
    w = odd.w
    compiled = remat.compile_step(odd.step, cost="roofline")
    other = remat.compile_step(lambda: gradient(w, box.loss) * type(odd).asked)
    for n in range(4):
        loss = float(n)
        other()
        odd.loss = float(n)
        compiled()
        odd.loss = 0.0
    assert Odd.asked == 0
    # The first call finds no gradient, and the third one that is given back.
    assert len(compiled.plans) <= 2
    assert len(other.plans) <= 2


def test_a_refused_step_leaves_containers_as_they_were() -> None:
    w, losses = parameter(), [1.0]

    def step() -> Tensor:
        losses.append(w.sum().item())
        return gradient(w, 1.0)

    with pytest.raises(CaptureError, match="read out of a tensor in losses"):
        remat.compile_step(step)()
    assert losses == [1.0]


def test_data_sets_and_what_holds_itself_may_be_named() -> None:
    w, numbers, itself = parameter(), list(range(100_000)), {"k": 1.0}
    itself["me"] = itself  # type: ignore[assignment]
    compiled = remat.compile_step(lambda n: gradient(w, numbers[n] * itself["k"]))
    assert torch.equal(compiled(3), gradient(w, 3.0))
    itself["k"] = 2.0
    assert torch.equal(compiled(3), gradient(w, 6.0))


def test_equal_arguments_make_one_graph() -> None:
    w = parameter()
    compiled = remat.compile_step(lambda n, where, given: gradient(w[where], n * given.k))
    for _ in range(3):
        compiled(np.int64(3), slice(0, 1), SimpleNamespace(k=1.0))
    assert len(compiled.plans) == 1


def _flat(result: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(result)
    return torch.cat([leaf.flatten() for leaf in leaves if leaf is not None])


def test_returned_tensors_alias_what_the_plain_ones_do() -> None:
    w = parameter()

    def step() -> Any:
        found = gradient(w, 1.0)
        with torch.no_grad():
            w.sub_(0.1 * found)
        return found, found, w.detach(), w.view(-1)[1:]

    compiled = remat.compile_step(step, cost="roofline")
    first, again, whole, part = compiled()
    assert first is again
    compiled()
    assert torch.equal(whole, w.detach())
    part.zero_()
    assert w[1] == 0


def test_a_compiled_step_inside_another_is_a_part_of_it() -> None:
    w = parameter()

    @remat.compile_step
    def inner() -> Tensor:
        return gradient(w, 2.0)

    outer = remat.compile_step(lambda: inner() + gradient(w, 1.0))
    assert torch.equal(outer(), gradient(w, 2.0) + gradient(w, 1.0))
    assert inner.plans == ()


def test_seeds_of_arguments_and_of_modules_are_refused() -> None:
    w, generator = parameter(), torch.Generator()

    def step(given: torch.Generator) -> Tensor:
        given.manual_seed(0)
        return gradient(w, torch.rand(2, generator=given))

    with pytest.raises(CaptureError, match="seeds a random generator"):
        remat.compile_step(step)(generator)


def test_a_hook_that_is_left_and_a_size_that_is_changed_are_refused() -> None:
    w = parameter()

    def hangs() -> Tensor:
        w.register_hook(lambda g: g * 2)
        return gradient(w, 1.0)

    with pytest.raises(CaptureError, match="leaves a hook on a tensor"):
        remat.compile_step(hangs)()

    def resizes(x: Tensor) -> Tensor:
        x.resize_(64)
        return gradient(w, 1.0)

    with pytest.raises(CaptureError, match="resizes a tensor"):
        remat.compile_step(resizes)(torch.ones(2))


def test_libraries_are_not_looked_through() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)
    model = GPT2LMHeadModel(config)

    def step(x: Tensor) -> Any:
        model(x, labels=x).loss.backward()

    roots, holders, _ = reach(step, (), ())
    assert roots == [model]
    assert {holder.name for holder in holders} == {"model"}
