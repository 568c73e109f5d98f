"""The second look at a whole step, what it reads without a name, and what tells its calls apart."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import step_contents
from remat.solvers.errors import CaptureError

SCALE = 1.0


class Cycle:
    """An iterator of Python."""

    def __init__(self, *items: float) -> None:
        self.items, self.at = items, -1

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.at = (self.at + 1) % len(self.items)
        return self.items[self.at]


class Table:
    """Read by an operator that nothing names."""

    def __getitem__(self, key: int) -> float:
        return SCALE * key


def training(by: Callable[[], float]) -> Any:
    w = nn.Parameter(torch.ones(4))
    return remat.compile_step(
        lambda: torch.autograd.grad((w * by()).square().sum(), w)[0], cost="roofline"
    )


def test_what_no_key_tells_shows_in_the_second_call(tmp_path: Any) -> None:
    file = tmp_path / "scale"
    file.write_text("1.0")
    step = training(lambda: float(file.read_text()))
    assert torch.equal(step(), torch.full((4,), 2.0))
    file.write_text("2.0")
    for _ in range(2):  # and it stays refused
        with pytest.raises(CaptureError, match=r"came out otherwise"):
            step()


def test_the_second_call_says_where_it_came_out_otherwise(tmp_path: Any) -> None:
    file = tmp_path / "scale"
    file.write_text("1.0")
    step = training(lambda: float(file.read_text()))
    step()
    file.write_text("2.0")
    with pytest.raises(CaptureError, match=r"aten.mul.Tensor .*1.0.* now .*2.0.*test_step_look"):
        step()


def test_constants_and_returned_numbers_are_compared(tmp_path: Any) -> None:
    file = tmp_path / "scale"
    w = nn.Parameter(torch.ones(4))

    def constant() -> Tensor:
        by = torch.tensor([float(file.read_text())] * 4)
        return torch.autograd.grad((w * by).sum(), w)[0]

    def returned() -> tuple[Tensor, float]:
        return torch.autograd.grad(w.sum(), w)[0], float(file.read_text())

    for function in (constant, returned):
        step = remat.compile_step(function, cost="roofline")
        file.write_text("1.0")
        step()
        file.write_text("2.0")
        with pytest.raises(CaptureError, match="came out otherwise"):
            step()


def test_a_step_runs_in_python_ever_more_rarely(capsys: pytest.CaptureFixture[str]) -> None:
    w = nn.Parameter(torch.ones(4))

    def function() -> Tensor:
        print("here")
        return torch.autograd.grad(w.sum(), w)[0]

    step = remat.compile_step(function, cost="roofline")
    for _ in range(10):
        step()
    assert capsys.readouterr().out == "here\n" * 5  # calls 1, 2, 3, 5 and 9
    assert len(step.plans) == 1


@pytest.mark.parametrize("items", [(1.0, 2.0), (1.0, 1.0, 2.0)])
def test_iterators_that_do_not_tell_their_place_are_refused(items: tuple[float, ...]) -> None:
    forever = itertools.cycle(items)
    step = training(lambda: next(forever))
    with pytest.raises(CaptureError, match="an iterator, forever, that does not tell its place"):
        step()


def test_iterators_that_tell_their_place_move_once() -> None:
    numbered = enumerate([5.0, 6.0, 7.0])
    step = training(lambda: next(numbered)[1])
    assert torch.equal(step(), torch.full((4,), 50.0))
    with pytest.raises(CaptureError, match="changes numbered in Python"):
        step()


def test_an_iterator_of_python_is_an_object_like_others() -> None:
    moves = Cycle(1.0, 1.0, 2.0)
    step = training(lambda: next(moves))
    assert [float(step()[0]) for _ in range(4)] == [2.0, 2.0, 8.0, 2.0]  # a place, a graph
    with pytest.raises(CaptureError, match=r"changes .* in Python"):
        step()


def test_what_operators_read_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table()
    step = training(lambda: table[2])
    for scale in (1.0, 2.0, 2.0, 3.0):
        monkeypatch.setattr("tests.remat.test_step_look.SCALE", scale)
        assert float(step()[0]) == 2 * (2 * scale) ** 2


def test_the_refusal_names_what_changed_last() -> None:
    model = nn.Linear(4, 1)
    held = SimpleNamespace(temperature=1.0)

    def step(x: Tensor, k: float) -> Tensor:
        loss = (model(x) * k / held.temperature).sum()
        return torch.autograd.grad(loss, model.weight)[0]

    def refused(change: Callable[[int], tuple[Any, ...]]) -> str:
        compiled = remat.compile_step(step, cost="roofline", time_limit=1)
        for n in range(8):
            compiled(*change(n))
        with pytest.raises(CaptureError, match="captured 8 times") as caught:
            compiled(*change(8))
        return str(caught.value)

    x = torch.randn(2, 4)
    assert "a number, a function, an object or the nesting" in refused(lambda n: (x, float(n)))
    assert "the size, dtype, strides" in refused(lambda n: (torch.randn(n + 1, 4), 1.0))

    def attribute(n: int) -> tuple[Any, ...]:
        model.phase = n  # type: ignore[assignment]
        return x, 1.0

    def temperature(n: int) -> tuple[Any, ...]:
        held.temperature = n + 1.0
        return x, 1.0

    assert "phase of Linear changed" in refused(attribute)
    assert "what held is, or holds changed" in refused(temperature)


def test_an_object_that_is_a_data_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_contents, "_MOST", 1000)
    held = SimpleNamespace(rows=[list(range(100)) for _ in range(100)])
    step = training(lambda: held.rows[0][1])
    with pytest.raises(CaptureError, match=r"holds more than 1,000 .*rows"):
        step()


def test_a_change_that_no_key_tells_is_noticed_later(tmp_path: Path) -> None:
    file = tmp_path / "scale"
    file.write_text("1.0")
    step = training(lambda: float(file.read_text()))
    for _ in range(6):
        step()
    file.write_text("2.0")
    step()
    step()  # with the old number, which nothing tells
    with pytest.raises(CaptureError, match="call 9 of the step came out otherwise"):
        step()


class Stateless:
    def __call__(self, x: Tensor) -> Tensor:
        return x.sin()


class Other(Stateless):
    def __call__(self, x: Tensor) -> Tensor:
        return x.cos()


class Counting:
    def on_end(self, trainer: Trainer) -> None:
        trainer.seen += 1


class Trainer:
    """Hands itself on to its callbacks, and calls a method whose name it puts together."""

    def __init__(self) -> None:
        self.w = nn.Parameter(torch.ones(4))
        self.seen, self.alpha, self.kind, self.callbacks = 0, 1.0, "l2", [Counting()]

    def loss_l2(self) -> Tensor:
        return (self.w * self.alpha).square().sum()

    def counted(self) -> Tensor:
        for callback in self.callbacks:
            callback.on_end(self)
        return torch.autograd.grad(self.w.sum(), self.w)[0]

    def dispatched(self) -> Tensor:
        return torch.autograd.grad(getattr(self, f"loss_{self.kind}")(), self.w)[0]


def test_what_an_object_is_asked_for_by_others_is_read() -> None:
    trainer = Trainer()
    step = remat.compile_step(trainer.counted, cost="roofline")
    for _ in range(3):
        step()
    assert trainer.seen == 3
    step = remat.compile_step(trainer.dispatched, cost="roofline")
    for alpha in (1.0, 2.0, 2.0, 3.0):
        trainer.alpha = alpha
        assert float(step()[0]) == 2 * alpha**2


def test_objects_without_state_partials_modules_and_generators_are_told_apart() -> None:
    held: Any = SimpleNamespace()
    w = nn.Parameter(torch.ones(4))

    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    def step() -> Tensor:
        noise = torch.rand(4, generator=held.generator)
        y = held.act(held.scale(held.drop(w))) * noise
        return torch.autograd.grad(y.sum(), w)[0]

    def run(compiled: Callable[[], Tensor]) -> list[Tensor]:
        held.act, held.scale = Stateless(), functools.partial(scaled, by=1.0)
        held.drop, held.generator = nn.Dropout(0.5).eval(), torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        seen = [compiled(), compiled()]
        held.act = Other()
        seen += [compiled(), compiled()]
        held.scale = functools.partial(scaled, by=2.0)
        seen += [compiled(), compiled()]
        held.generator = torch.Generator().manual_seed(7)
        seen += [compiled(), compiled()]
        held.drop.train()
        return [*seen, compiled(), compiled()]

    torch.testing.assert_close(
        run(remat.compile_step(step, cost="roofline")), run(step), rtol=0, atol=0
    )


def test_attributes_of_parameters_are_there_and_tensors_as_keys_are_refused() -> None:
    model = nn.Linear(4, 4)
    model.bias.no_decay = True  # type: ignore[attr-defined]
    frozen = {model.bias}

    def step(choose: Callable[[Tensor], bool]) -> Tensor:
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if not choose(parameter):
                    parameter.mul_(0.5)
        return model.bias.detach().clone()

    before = model.bias.detach().clone()
    by_attribute = remat.compile_step(
        lambda: step(lambda p: getattr(p, "no_decay", False)), state=model, cost="roofline"
    )
    assert torch.equal(by_attribute(), before)
    by_set = remat.compile_step(lambda: step(lambda p: p in frozen), state=model, cost="roofline")
    with pytest.raises(CaptureError, match="the step reaches frozen, which has tensors"):
        by_set()


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.arange(size).float()


def test_a_cache_keeps_nothing_of_a_trace() -> None:
    w = nn.Parameter(torch.ones(4, 4))
    mask.cache_clear()
    step = remat.compile_step(
        lambda: torch.autograd.grad((w * mask(4)[None]).sum(), w)[0], cost="roofline"
    )
    assert torch.equal(step(), torch.arange(4).float()[None].expand(4, 4))
    assert type(mask(4)) is Tensor


def test_what_shows_nothing_is_told_by_being_itself() -> None:
    held: Any = SimpleNamespace()
    w = nn.Parameter(torch.ones(4))
    step = remat.compile_step(
        lambda: torch.autograd.grad(held.op(held.pick((w, w * 2))).sum(), w)[0], cost="roofline"
    )
    for op, pick in ((torch.Tensor.sin, 0), (torch.Tensor.cos, 0), (torch.Tensor.cos, 1)):
        held.op, held.pick = op, operator.itemgetter(pick)
        for _ in range(2):
            x = w.detach().clone().requires_grad_()
            (wanted,) = torch.autograd.grad(op((x, x * 2)[pick]).sum(), x)
            assert torch.equal(step(), wanted)


def test_what_no_graph_can_be_is_named() -> None:
    w = nn.Parameter(torch.ones(4, 4))
    table = nn.Embedding(4, 4, sparse=True)
    inner = torch.compile(lambda x: x.sin(), backend="aot_eager")

    def sparse() -> None:
        table(torch.arange(2)).sum().backward()

    def compiled() -> Tensor:
        return torch.autograd.grad(inner(w).sum(), w)[0]

    for function, message in (
        (sparse, "sparse=False"),
        (compiled, "hand over the module or the function itself"),
    ):
        with pytest.raises(CaptureError, match=message):
            remat.compile_step(function, cost="roofline")()
