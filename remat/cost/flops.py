"""FLOPs of graph nodes, from shapes alone.

``torch.utils.flop_counter`` has the formulas of matrix products, convolutions and of attention on
CUDA: a multiply-add counts two, pointwise work nothing, a causal mask saves nothing. Two things
are missing there and would flatter whoever recomputes attention: the attention kernel of the CPU,
and every op inside a wrapper that saves or replays the state of a random generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import fx
from torch.utils import flop_counter

Shape = tuple[int, ...]

_RANDOM_STATE_WRAPPERS: Final = {
    # name: (index of the wrapped op among the arguments, index of its result or None if bare)
    "run_and_save_rng_state": (0, 1),
    "run_with_rng_state": (1, None),
    "graphsafe_run_with_rng_state": (0, None),
}


class WrappedCall(NamedTuple):
    """The call of an op that a node makes, itself or through a wrapper, on values not nodes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


def _grouped_product(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Groups share out a dimension of a 2-D operand; each has its own only if both are 3-D."""
    groups = a[0] if len(a) == len(b) == 3 else 1
    return groups * 2 * math.prod(a[-2:]) * b[-1]


def _integer_product(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


# By name: a version of torch that lacks one of them just never calls it.
_FORMULAS: Final[dict[str, Callable[..., int]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "aten::_int_mm": _integer_product,
}


def node_flops(node: fx.Node) -> int:
    """FLOPs of running ``node`` once: 0 for what has no formula, and for anything but a call.

    The node and its inputs need ``meta["val"]``; symbolic sizes count by their hints.
    """
    if node.op != "call_function":
        return 0
    call = wrapped_call(node)
    if isinstance(call.target, torch._ops.HigherOrderOperator) and call.args:
        inner = call.args[0]
        if isinstance(inner, fx.GraphModule):
            return graph_flops(inner)
    return _call_flops(call)


def graph_flops(graph_module: fx.GraphModule) -> int:
    """FLOPs of running every node of the graph once."""
    return sum(node_flops(node) for node in graph_module.graph.nodes)


def wrapped_call(node: fx.Node, values: Mapping[fx.Node, Any] | None = None) -> WrappedCall:
    """What ``node`` calls, with the values its inputs have in the graph (fake tensors, graph
    modules) or in ``values``; for a wrapper that saves or replays a random state, the op inside."""
    known = values or {}
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda n: known[n] if n in known else _value_of(n)
    )
    result = node.meta.get("val")
    name = node.target.name() if isinstance(node.target, torch._ops.OperatorBase) else ""
    if name not in _RANDOM_STATE_WRAPPERS:
        return WrappedCall(node.target, tuple(args), dict(kwargs), result)
    position, index = _RANDOM_STATE_WRAPPERS[name]
    inner_kwargs = {key: value for key, value in kwargs.items() if key != "rng_state"}
    if index is not None and isinstance(result, tuple | list):
        result = result[index]
    return WrappedCall(args[position], tuple(args[position + 1 :]), inner_kwargs, result)


def _value_of(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:
        module = node.graph.owning_module
        return None if module is None else _attribute(module, str(node.target))
    return node.meta.get("val")


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _call_flops(call: WrappedCall) -> int:
    packet = getattr(call.target, "overloadpacket", call.target)
    try:
        formula = flop_counter.flop_registry.get(packet)
    except TypeError:  # an unhashable callable is no op
        return 0
    if formula is not None:
        return _as_int(formula(*call.args, **call.kwargs, out_val=call.result))
    own = _FORMULAS.get(call.target.name().split(".")[0]) if hasattr(call.target, "name") else None
    if own is None:
        return 0
    return _as_int(own(*map(_shape, call.args)))


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _as_int(count: int | torch.SymInt) -> int:
    return int(count.node.hint) if isinstance(count, torch.SymInt) else int(count)
