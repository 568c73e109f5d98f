"""``remat demo``: two trainings that can be compared, and an exit code that tells the truth."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import remat
from remat.cli import demo, main
from remat.cli._training import (
    PRESETS,
    Batches,
    Training,
    build_model,
    python_sources,
    same_numbers,
    train,
)
from remat.measurement import Measurement
from remat.solvers.errors import InvalidOption

LITTLE = dataclasses.replace(PRESETS["tiny"], layers=1, hidden=16, heads=2, sequence=16, batch=2)


@pytest.fixture(autouse=True)
def _one_thread_and_a_fresh_compiler() -> Iterator[None]:
    # Small ops gain nothing from threads, and on a busy machine lose tenfold by waiting for them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever plan is found in a second holds the budget."""
    monkeypatch.setattr(remat, "compile", functools.partial(remat.compile, time_limit=1.0))


def plainly(model: Any, optimizer: Any) -> Any:
    return model


def trained(peak: int) -> Training:
    measurement = Measurement(peak=peak, resident=10, graph=peak - 10, reserved=None, seconds=0.1)
    losses = [torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1.0)]
    return Training(losses, [0.5, 0.1, 0.1], measurement, {"w": torch.ones(2)}, {})


class FakePlan(SimpleNamespace):
    def __str__(self) -> str:
        return "the plan"


def plan(budget: int) -> Any:
    return FakePlan(memory_budget=budget, baseline_peak=200, peak=100, extra_time=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_the_demo_trains_under_half_the_activation_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["demo", "--steps", "4"])
    output = capsys.readouterr()
    assert code == 0, output
    assert "budget held" in output.out
    for what in ("losses", "gradients", "parameters"):
        assert f"{what} identical bit for bit" in output.out
    assert "layer" in output.out
    assert [line for line in output.out.splitlines() if len(line) > 80] == []
    assert "\x1b" not in output.out
    assert output.err == ""


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_a_budget_below_the_floor_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "2", "--memory-budget", "1MiB"]) == 1
    assert "too small" in capsys.readouterr().err


def test_a_budget_that_is_none_is_known_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("remat.cli._training.train", lambda *_: pytest.fail("trained"))
    assert main(["demo", "--memory-budget", "8 potatoes"]) == 1
    assert "memory_budget='8 potatoes' is no byte size" in capsys.readouterr().err


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "transformers" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "not installed" in error
    assert 'pip install "remat[demo]"' in error


def test_a_broken_budget_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo._report(trained(200), trained(100), plan(100)) == 0
    assert "budget held" in capsys.readouterr().out
    assert demo._report(trained(200), trained(101), plan(100)) == 1
    assert "budget BROKEN: 100 B asked for, 101 B measured" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["losses", "gradients"])
def test_a_changed_number_is_a_failure(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed = trained(100)
    tensors = changed.losses[0] if what == "losses" else changed.gradients["w"]
    tensors.mul_(1 + 1e-6)
    assert demo._report(trained(200), changed, plan(100)) == 1
    assert f"{what} DIFFER" in capsys.readouterr().out


def test_training_learns_and_repeats_bit_by_bit() -> None:
    text = python_sources()
    first, second = (train(LITTLE, text, 12, plainly) for _ in range(2))
    assert same_numbers(first, second) == dict.fromkeys(("losses", "gradients", "parameters"), True)
    assert first.losses[-1] < first.losses[0]
    assert len(first.seconds) == len(first.losses) == 12
    assert first.peak > first.measurement.resident  # type: ignore[union-attr]


def test_the_optimizer_starts_with_its_state_made_and_unused() -> None:
    states: list[Any] = []

    def look(model: Any, optimizer: Any) -> Any:
        states.extend(optimizer.state.values())
        assert all(float(state[name].abs().max()) == 0 for state in states for name in state)
        wanted = build_model(LITTLE).state_dict()
        assert all(torch.equal(wanted[name], t) for name, t in model.state_dict().items())
        return model

    train(LITTLE, python_sources(), 2, look)
    assert states


def test_one_step_cannot_be_compared() -> None:
    with pytest.raises(InvalidOption, match=r"steps=1: .* at least 2"):
        train(LITTLE, python_sources(), 1, plainly)


def test_labels_are_the_next_bytes() -> None:
    text = python_sources()
    batches = Batches(text, LITTLE)
    batches.advance()
    assert torch.equal(batches.tokens[:, 1:], batches.labels[:, :-1])
    first = batches.tokens.clone()
    batches.advance()
    assert not torch.equal(first, batches.tokens)


def test_the_chart_shows_where_curves_meet_and_part() -> None:
    same = demo.loss_chart([3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    assert sum(line.count("*") for line in same[1:]) == 3
    apart = demo.loss_chart([3.0, 2.0, 1.0], [3.0, 2.0, 2.0])
    assert "o" in apart[-2]
    assert "x" not in apart[-2]
    assert apart[1].startswith("  3.00 |")
    long = demo.loss_chart([float(i) for i in range(500)], [0.0] * 500)
    assert max(map(len, long)) <= 80
    assert demo.loss_chart([1.0, 1.0], [1.0, 1.0])[1].count("*") == 2


def test_presets_are_the_choices() -> None:
    assert tuple(PRESETS) == demo._MODELS
