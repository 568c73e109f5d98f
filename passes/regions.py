"""Regions that torch compiles once and calls often (``nested_compile_region``), put back in line.

AOTAutograd leaves each call as one node, ``invoke_subgraph``, and asks for a partition of the
body by itself. The fake values of such nodes are those of the body: two calls seem to share their
storages, and a body that saves an input of its own seems to copy it. Inlined, every op of the
region is planned like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from remat.passes.joint import is_getitem
from remat.passes.torch_private import partition as private

Stack = Mapping[str, tuple[str, Any]]
"""Modules from the outermost in: some key → (path, class)."""


def inline_regions(module: fx.GraphModule) -> int:
    """Replace every call of a region by the region's ops; how many calls there were.

    Regions inside regions are inlined too. Fake values are computed anew, so that each call has
    storages of its own.
    """
    count = 0
    while calls := list(_calls(module)):
        for call in calls:
            _inline(module, call)
        count += len(calls)
    if count:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return count


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is private.INVOKE_SUBGRAPH:
            yield node


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    body = _body(module, call)
    values: dict[fx.Node, Any] = {}
    arguments = iter(call.args[2:])
    with module.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "output":
                returned: Any = fx.map_arg(node.args[0], lambda inner: values[inner])
            elif node.op == "get_attr":
                values[node] = _constant(module, body, node)
            else:
                values[node] = _copy(module, node, values, call)
    for user in list(call.users):
        if not is_getitem(user):
            raise TypeError(f"{user.name} reads the tuple {call.name} as a whole")
        picked = returned[user.args[1]]
        if isinstance(picked, fx.Node):
            user.replace_all_uses_with(picked)
        else:  # a gradient that is None
            _replace_by_constant(user, picked)
        module.graph.erase_node(user)
    module.graph.erase_node(call)


def _body(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    attribute = call.args[0]
    assert isinstance(attribute, fx.Node), "invoke_subgraph takes its body from an attribute"
    body = module.get_submodule(str(attribute.target))
    assert isinstance(body, fx.GraphModule), "the body of invoke_subgraph is a graph"
    return body


def _constant(module: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The body's attribute, which is made one of ``module`` under a free name."""
    held = operator.attrgetter(str(node.target))(body)
    name = free = str(node.target).replace(".", "_")
    suffix = 0
    while hasattr(module, free) and getattr(module, free) is not held:
        suffix += 1
        free = f"{name}_{suffix}"
    setattr(module, free, held)
    made = module.graph.get_attr(free)
    made.meta = dict(node.meta)
    return made


def _copy(
    module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], call: fx.Node
) -> fx.Node:
    made = module.graph.node_copy(node, lambda inner: values[inner])
    made.meta = dict(node.meta)
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if key in made.meta and call.meta.get(key):
            made.meta[key] = moved_stack(made.meta[key], call.meta[key])
    if made.target is not private.INVOKE_SUBGRAPH:
        made.meta["val"] = _fake_value(module, made)
    return made


def moved_stack(stack: Stack, call: Stack) -> Stack:
    """The modules of an op of a body, which names those of its first call, for another call."""
    moved = dict(call)
    path, called = list(call.values())[-1]
    inner = list(stack.items())
    anchors = [at for at, (_, (_, kind)) in enumerate(inner) if kind is called]
    if anchors:
        first = inner[anchors[-1]][1][0]
        for key, (at, kind) in inner[anchors[-1] + 1 :]:
            moved[key] = (path + at.removeprefix(first), kind)
    return moved


def _fake_value(module: fx.GraphModule, node: fx.Node) -> Any:
    def value(source: fx.Node) -> Any:
        if "val" in source.meta:
            return source.meta["val"]
        return operator.attrgetter(str(source.target))(module)

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    with private.fake_mode_of(node.meta.get("val"), args), torch.no_grad():
        target: Any = node.target
        return target(*args, **kwargs)


def _replace_by_constant(node: fx.Node, constant: Any) -> None:
    for user in list(node.users):
        args, kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda source: constant if source is node else source
        )
        user.args, user.kwargs = args, kwargs
