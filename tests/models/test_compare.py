"""The comparisons that other tests rest on see what they should see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.models.compare import differences, inexact, left_behind, seed_everything

ONE = torch.tensor([1.0, 2.0])
ULP = torch.finfo(torch.float32).eps


def test_every_bit_counts() -> None:
    assert differences({"a": [ONE]}, {"a": [ONE.clone()]}) == []
    assert differences({"a": [ONE]}, {"a": [ONE + ULP]}) == ["a/0"]
    assert differences({"a": ONE}, {"a": ONE.double()}) == ["a"]
    assert differences({"zero": torch.zeros(1)}, {"zero": -torch.zeros(1)}) == ["zero"]
    assert differences({"a": 1}, {"b": 1}) == ["structure"]
    assert differences({"a": (1, 2)}, {"a": [1, 2]}) == ["a"]
    assert differences({"a": 1}, {"a": True}) == ["a"]


def test_dataclasses_are_compared_by_field() -> None:
    @dataclass
    class Pair:
        y: torch.Tensor
        note: str

    assert differences(Pair(ONE, "a"), Pair(ONE.clone(), "a")) == []
    assert differences(Pair(ONE, "a"), Pair(ONE * 2, "b")) == ["y", "note"]


def test_zeros_may_stand_for_no_gradient_only_where_asked_and_only_zeros() -> None:
    none, zero, one = {"gradient/w": None}, {"gradient/w": torch.zeros(2)}, {"gradient/w": ONE}
    assert differences(none, zero) == ["gradient/w"]
    assert differences(none, zero, zero_is_none=True) == []
    assert differences(none, one, zero_is_none=True) == ["gradient/w"]
    assert differences(zero, none, zero_is_none=True) == ["gradient/w"]
    assert differences({"value/w": None}, {"value/w": torch.zeros(2)}, zero_is_none=True) != []


def test_twice_the_error_of_stock_inductor_is_allowed() -> None:
    exact = {"a": ONE.double()}
    assert inexact({"a": ONE * 1.002}, {"a": ONE * 0.999}, exact) == []
    assert inexact({"a": ONE * 1.003}, {"a": ONE * 0.999}, exact) == ["a"]


def test_a_few_ulps_are_allowed_where_stock_inductor_is_exact() -> None:
    exact = {"a": ONE.double()}
    assert inexact({"a": ONE + 2 * ULP}, {"a": ONE}, exact) == []
    assert inexact({"a": ONE + 20 * ULP}, {"a": ONE}, exact) == ["a"]
    assert inexact({"a": ONE + 20 * ULP}, {"a": ONE}) == ["a"]  # random: held to stock itself
    assert inexact({"a": ONE.double()}, {"a": ONE}) == ["a"]
    assert inexact({"a": torch.tensor([1])}, {"a": torch.tensor([2])}) == ["a"]
    assert inexact({"a": torch.tensor([float("nan"), 1.0])}, {"a": ONE}) == ["a"]


def test_what_a_loop_leaves_behind_holds_both_random_states() -> None:
    model = torch.nn.BatchNorm1d(2)
    seed_everything()
    before = left_behind(model)
    torch.rand(1)
    model(torch.randn(3, 2)).sum().backward()
    changed = differences(before, left_behind(model))
    assert {"rng", "value/running_mean", "gradient/weight"} <= set(changed)
    assert "value/weight" not in changed
