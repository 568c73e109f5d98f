"""One table of op properties: view, random, mutating, never to be run again.

What an op is comes from its schema and tags where torch says it, from the lists below where it does
not. A higher-order op is what the ops of its bodies are, if it does nothing but call them. An op
nobody knows (a custom op, a Triton kernel, any other higher-order op) is kept, never run again, and
reported.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

KNOWN_NAMESPACES: Final = frozenset({"aten", "prims", "quantized", "torchvision", "remat"})
"""Namespaces whose ops are functions of their arguments unless schema or tags say otherwise."""

COLLECTIVE_NAMESPACES: Final = frozenset({"_c10d_functional", "c10d_functional", "c10d", "fsdp"})

CALLS_ITS_BODIES: Final = frozenset(
    {
        "associative_scan", "cond", "flex_attention", "flex_attention_backward", "invoke_subgraph",
        "map_impl", "scan", "while_loop", "while_loop_stack_output",
    }
)  # fmt: skip
"""Higher-order ops that do nothing but call the graphs they are given, and combine results."""

_TRITON_IN_PLACE: Final = "triton_kernel_wrapper_mutation"

_DECISIONS: Final = frozenset(
    {
        "argmax", "argmin", "argsort", "bucketize", "cummax", "cummin", "kthvalue", "max", "median",
        "min", "mode", "msort", "nanmedian", "searchsorted", "sort", "topk", "_unique2",
    }
)  # fmt: skip
_CASTS: Final = frozenset({"_to_copy", "convert_element_type"})

_DROPOUT_ARGUMENT: Final = {
    # Tagged as random whatever their dropout probability; at zero they draw nothing.
    "_scaled_dot_product_flash_attention": ("dropout_p", 3, 0.0),
    "_scaled_dot_product_efficient_attention": ("dropout_p", 5, 0.0),
    "_scaled_dot_product_cudnn_attention": ("dropout_p", 5, 0.0),
    "_scaled_dot_product_flash_attention_for_cpu": ("dropout_p", 3, 0.0),
    "_scaled_dot_product_fused_attention_overrideable": ("dropout_p", 4, 0.0),
    "_scaled_dot_product_attention_math": ("dropout_p", 4, 0.0),
    "_scaled_dot_product_attention_math_for_mps": ("dropout_p", 4, 0.0),
}


def overload(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op a node calls, or None for Python functions and higher-order ops."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def schema_name(node: fx.Node) -> str:
    """``aten::add``; empty for what is no operator."""
    op = overload(node)
    return "" if op is None else op._schema.name


def parts_of(value: Any) -> tuple[Any, ...]:
    """What a node's value consists of: the items of a tuple, list or dict, else itself."""
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def bodies(node: fx.Node) -> tuple[fx.GraphModule, ...]:
    """The graphs a higher-order op is given; empty for anything else."""
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return ()
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    found = (operator.attrgetter(name)(owner) for name in dict.fromkeys(names))
    return tuple(body for body in found if isinstance(body, fx.GraphModule))


def body_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The calls in all graphs a higher-order op is given."""
    for body in bodies(node):
        yield from (inner for inner in body.graph.nodes if inner.op == "call_function")


def is_view(node: fx.Node) -> bool:
    """Whether the schema says that an output is an alias of an input that is not written."""
    op = overload(node)
    if op is None:
        return False
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in op._schema.returns
    )


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random generator."""
    op = overload(node)
    if op is None:
        wrapped = [arg for arg in node.args if isinstance(arg, torch._ops.OpOverload)]
        tagged = any(torch.Tag.nondeterministic_seeded in inner.tags for inner in wrapped)
        return tagged or any(is_random(inner) for inner in body_nodes(node))
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    known = _DROPOUT_ARGUMENT.get(op._schema.name.split("::")[-1])
    return known is None or _argument(node, *known) != 0.0


def mutated_args(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments the op writes into."""
    op = overload(node)
    if _name(node.target) == _TRITON_IN_PLACE:
        # Which of them the kernel writes is known to Triton alone.
        given = parts_of(node.kwargs.get("kwargs"))
        yield from (item for item in given if isinstance(item, fx.Node))
    if op is None or not op._schema.is_mutable:
        return
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = _argument(node, argument.name, index, None)
            yield from (item for item in parts_of(given) if isinstance(item, fx.Node))


def is_collective(node: fx.Node) -> bool:
    """Whether the op talks to other ranks."""
    op = overload(node)
    return op is not None and op.namespace in COLLECTIVE_NAMESPACES


def returns_nothing(node: fx.Node) -> bool:
    """Whether the op is run for its effect alone (an assertion); it has no fake value."""
    op = overload(node)
    return op is not None and not op._schema.returns


def has_effect(node: fx.Node) -> bool:
    """Whether the op does more than compute its outputs."""
    if node.op != "call_function":
        return False
    op = overload(node)
    if op is None:
        in_place = _name(node.target) == _TRITON_IN_PLACE or node.is_impure(impure_random=False)
        return in_place or any(has_effect(inner) for inner in body_nodes(node))
    return op._schema.is_mutable or is_collective(node) or node.is_impure(impure_random=False)


def why_never_again(node: fx.Node) -> str | None:
    """Why the op may not be run a second time, or None if it may."""
    op = overload(node)
    if op is None:
        return _why_never_again_by_bodies(node)
    if is_collective(node):
        return f"{op} is a collective"
    if has_effect(node):
        return f"{op} has a side effect"
    if node.kwargs.get("generator") is not None:
        return f"{op} draws from a generator of its own"
    if op.namespace not in KNOWN_NAMESPACES:
        return f"{op} is a custom operator remat does not know"
    return None


def decides(node: fx.Node) -> bool:
    """Whether a rounding more or less makes the op choose another: an order, a place, an integer.

    Not pooling: where two are as good as equal, either may have the gradient.
    """
    namespace, _, name = schema_name(node).partition("::")
    if name in _CASTS:
        read = [part for source in node.all_input_nodes for part in parts_of(source.meta["val"])]
        return any(map(_is_float, read)) and not _is_float(node.meta["val"])
    return namespace in KNOWN_NAMESPACES and name in _DECISIONS


def _is_float(part: object) -> bool:
    floats = isinstance(part, torch.Tensor) and part.is_floating_point()
    return floats or (isinstance(part, torch.Tensor) and part.is_complex())


def is_known(node: fx.Node) -> bool:
    """Whether remat knows what the op does: all but custom operators and unknown Python calls."""
    op = overload(node)
    if op is not None:
        return op.namespace in KNOWN_NAMESPACES or is_collective(node)
    return _is_plain_python(node) or _why_never_again_by_bodies(node) is None


def _why_never_again_by_bodies(node: fx.Node) -> str | None:
    name, found = _name(node.target), bodies(node)
    if name not in CALLS_ITS_BODIES or not found:
        return f"{name} is not an operator remat knows"
    for inner in body_nodes(node):
        if is_random(inner):
            return f"{name} draws random numbers in its body ({inner.target})"
        why = None if _is_plain_python(inner) else why_never_again(inner)
        if why is not None:
            return f"{why}, and is called in the body of {name}"
    return None


def _is_plain_python(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", None) in ("_operator", "math")


def _argument(node: fx.Node, name: str, position: int, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def _name(target: Any) -> str:
    return getattr(target, "__name__", None) or str(target)
