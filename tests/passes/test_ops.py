import pytest
import torch
import torch.nn.functional as F
from torch import fx

from remat.passes import ops

aten = torch.ops.aten


def call(target: object, *args: object, **kwargs: object) -> fx.Node:
    graph = fx.Graph()
    made = [graph.placeholder(f"x{i}") if arg == "x" else arg for i, arg in enumerate(args)]
    return graph.call_function(target, tuple(made), kwargs)


def test_views_are_known_by_their_schema() -> None:
    assert ops.is_view(call(aten.view.default, "x", [2]))
    assert ops.is_view(call(aten.split.Tensor, "x", 2))
    assert not ops.is_view(call(aten.clone.default, "x"))
    assert not ops.is_view(call(aten.add_.Tensor, "x", "x"))


def test_attention_is_random_only_with_dropout() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not ops.is_random(call(attention, "x", "x", "x"))
    assert not ops.is_random(call(attention, "x", "x", "x", 0.0))
    assert ops.is_random(call(attention, "x", "x", "x", 0.1))
    assert ops.is_random(call(attention, "x", "x", "x", dropout_p=0.1))


def test_a_dropout_of_zero_draws_all_the_same() -> None:
    before = torch.get_rng_state()
    aten.native_dropout(torch.ones(8), 0.0, True)
    assert not torch.equal(before, torch.get_rng_state())
    assert ops.is_random(call(aten.native_dropout.default, "x", 0.0, True))


def test_what_may_never_run_again_says_why() -> None:
    assert ops.why_never_again(call(aten.mm.default, "x", "x")) is None
    assert "side effect" in ops.why_never_again(call(aten.copy_.default, "x", "x"))
    assert "not an operator" in ops.why_never_again(call(F.relu, "x"))


def test_a_custom_operator_is_kept_and_reported() -> None:
    @torch.library.custom_op("remat_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    node = call(torch.ops.remat_test.twice.default, "x")
    assert "custom operator" in ops.why_never_again(node)


def test_mutated_arguments_come_from_the_schema() -> None:
    node = call(aten.copy_.default, "x", "x")
    assert [argument.name for argument in ops.mutated_args(node)] == ["x0"]
    assert not list(ops.mutated_args(call(aten.add.Tensor, "x", "x")))


@pytest.mark.parametrize("target", [aten.rand_like.default, aten.bernoulli.default])
def test_draws_are_random(target: object) -> None:
    assert ops.is_random(call(target, "x"))
