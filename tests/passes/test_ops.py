import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat.passes import ops
from remat.passes.joint import JointGraph
from remat.passes.storages import Storages

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


def with_body(target: object, body: Callable[..., object], *shape: int) -> fx.Node:
    """A call of a higher-order op whose one graph is ``body``."""
    owner = torch.nn.Module()
    owner.body = make_fx(body)(torch.ones(*shape))
    graph = fx.Graph(owning_module=owner)
    x = graph.placeholder("x")
    node = graph.call_function(target, (graph.get_attr("body"), x))
    graph.output(node)
    return node


SCAN = torch.ops.higher_order.scan


def test_a_higher_order_op_over_pure_bodies_may_run_again() -> None:
    node = with_body(SCAN, lambda x: x.sin() + 1, 2)
    assert ops.why_never_again(node) is None
    assert ops.is_known(node)
    assert not ops.has_effect(node)
    assert not ops.is_random(node)
    assert [str(inner.target) for inner in ops.body_nodes(node)] == [
        "aten.sin.default",
        "aten.add.Tensor",
    ]


def test_what_a_body_does_its_caller_does() -> None:
    random = with_body(SCAN, lambda x: torch.rand_like(x) * x, 2)
    assert ops.is_random(random)
    assert "draws random numbers in its body" in ops.why_never_again(random)
    writing = with_body(SCAN, lambda x: x.add_(1), 2)
    assert ops.has_effect(writing)
    assert "side effect" in ops.why_never_again(writing)


def test_a_higher_order_op_without_visible_bodies_is_kept() -> None:
    assert "not an operator remat knows" in ops.why_never_again(call(SCAN, "x"))
    hints = with_body(torch.ops.higher_order.strict_mode, lambda x: x.sin(), 2)
    assert "strict_mode is not an operator remat knows" in ops.why_never_again(hints)
    assert not ops.is_known(hints)


def flex_attention(score: Callable[..., object]) -> fx.Node:
    """As AOTAutograd leaves it: score and mask graphs, the latter inside the block mask."""
    owner = torch.nn.Module()
    owner.score = make_fx(score)(torch.ones(()), *(torch.tensor(0) for _ in range(4)))
    owner.mask = make_fx(lambda b, h, q, k: q >= k)(*(torch.tensor(0) for _ in range(4)))
    graph = fx.Graph(owning_module=owner)
    q, k, v = (graph.placeholder(name) for name in "qkv")
    mask = (8, 8, *[None] * 8, 128, 128, graph.get_attr("mask"))
    arguments = (q, k, v, graph.get_attr("score"), mask, 0.5, {}, (), ())
    return graph.call_function(torch.ops.higher_order.flex_attention, arguments)


def test_flex_attention_runs_again_if_its_score_and_mask_are_pure() -> None:
    node = flex_attention(lambda score, b, h, q, k: score + (q - k))
    assert len(ops.bodies(node)) == 2
    assert ops.why_never_again(node) is None
    drop = flex_attention(lambda score, b, h, q, k: score * torch.bernoulli(score))
    assert "draws random numbers" in ops.why_never_again(drop)


def triton_call(target: object, graph: fx.Graph) -> fx.Node:
    x, out = graph.placeholder("x"), graph.placeholder("out")
    kwargs = {
        "kernel_idx": 0,
        "constant_args_idx": 0,
        "grid": [(1, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"in_ptr": x, "out_ptr": out, "n": 4},
    }
    return graph.call_function(target, (), kwargs)


def test_a_triton_kernel_that_writes_has_an_effect_on_all_it_is_given() -> None:
    graph = fx.Graph()
    node = triton_call(torch.ops.higher_order.triton_kernel_wrapper_mutation, graph)
    assert ops.has_effect(node)
    assert [argument.name for argument in ops.mutated_args(node)] == ["x", "out"]


def test_a_functional_triton_kernel_is_kept_and_its_dict_of_outputs_is_memory() -> None:
    graph = fx.Graph()
    node = triton_call(torch.ops.higher_order.triton_kernel_wrapper_functional, graph)
    out = graph.call_function(operator.getitem, (node, "out_ptr"))
    graph.output((out,))
    with FakeTensorMode():
        values = {name: torch.empty(4) for name in ("primals_1", "primals_2", "out_ptr")}
    for placeholder, name in zip(graph.find_nodes(op="placeholder"), values, strict=False):
        placeholder.target = name
        placeholder.meta["val"] = values[name]
    node.meta["val"] = {"out_ptr": values["out_ptr"]}
    out.meta["val"] = values["out_ptr"]
    assert "triton_kernel_wrapper_functional is not an op" in ops.why_never_again(node)
    assert not ops.has_effect(node)
    joint = JointGraph.make(fx.GraphModule(torch.nn.Module(), graph), 1)
    storages = Storages.of(joint)
    kernel, picked = joint.nodes[-2:]
    assert storages.created[kernel] == storages.held[picked] != ()
    assert storages.bytes[storages.created[kernel][0]] == 16
    assert joint.phases[kernel] == "forward"


def test_a_kernel_that_writes_in_place_is_no_dead_code() -> None:
    graph = fx.Graph()
    triton_call(torch.ops.higher_order.triton_kernel_wrapper_mutation, graph)
    graph.output(())
    with FakeTensorMode():
        for placeholder, name in zip(
            graph.find_nodes(op="placeholder"), ("primals_1", "primals_2"), strict=True
        ):
            placeholder.target = name
            placeholder.meta["val"] = torch.empty(4)
    joint = JointGraph.make(fx.GraphModule(torch.nn.Module(), graph), 0)
    assert joint.nodes[-1].op == "call_function"
    assert len(joint.mutated_primals) == 2


def test_a_wrapped_mutable_operator_is_as_random_as_what_it_wraps() -> None:
    wrapper = torch.ops.higher_order.auto_functionalized_v2
    assert ops.is_random(call(wrapper, aten.bernoulli_.float, "x"))
    assert not ops.is_random(call(wrapper, aten.copy_.default, "x"))


def test_graphs_with_other_bodies_have_other_hashes() -> None:
    hashes = {joint_of(lambda x: x.sin()).hash, joint_of(lambda x: x.cos()).hash}
    assert len(hashes) == 2
    assert joint_of(lambda x: x.sin()).hash in hashes


def joint_of(body: Callable[..., object]) -> JointGraph:
    node = with_body(SCAN, body, 2)
    placeholder = node.graph.find_nodes(op="placeholder")[0]
    placeholder.target = "primals_1"
    for valued in (placeholder, node):
        with FakeTensorMode():
            valued.meta["val"] = torch.empty(2)
    return JointGraph.make(fx.GraphModule(node.graph.owning_module, node.graph), 1)


def test_decisions_are_told_from_what_is_only_an_integer() -> None:
    def graph(x: torch.Tensor) -> torch.Tensor:
        place = x.max(dim=1)[1] + x.argmax(dim=1) + x.long().sum(1) + (x > 0).long().sum(1)
        return torch.nn.functional.max_pool1d(x, 2).sum(1) + place

    made = make_fx(graph)(torch.randn(4, 8))
    found = {node.target for node in made.graph.nodes if ops.decides(node)}
    aten = torch.ops.aten
    assert found == {aten.max.dim, aten.argmax.default, aten._to_copy.default}
    casts = [node for node in made.graph.nodes if node.target is aten._to_copy.default]
    assert [ops.decides(node) for node in casts] == [True, False]  # of floats; of a comparison
