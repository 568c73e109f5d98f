"""The second look at a whole step, what it reads without a name, and what tells its calls apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
        with pytest.raises(CaptureError, match=r"came out otherwise|cannot see"):
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


def test_a_step_runs_twice_in_python_and_then_alone(capsys: pytest.CaptureFixture[str]) -> None:
    w = nn.Parameter(torch.ones(4))

    def function() -> Tensor:
        print("here")
        return torch.autograd.grad(w.sum(), w)[0]

    step = remat.compile_step(function, cost="roofline")
    for _ in range(4):
        step()
    assert capsys.readouterr().out == "here\n" * 2
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
