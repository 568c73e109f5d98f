"""What the library kernels of a wrapper take, from the same store as the ops of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.cost.flops import WrappedCall
from remat.cost.profile import Profiler, signature
from remat.executors.wrapper_memory import OpBytes


class MeasuredWorkspaces:
    """A ``workspace`` for the replay: each signature is run once, alone, and remembered.

    Args:
        profiler: of the device the step runs on.
        run: run signatures not met before; False counts them as nothing, and lists them.

    Attributes:
        assumed: op → why it was taken to need no workspace.
    """

    def __init__(self, profiler: Profiler, *, run: bool = True) -> None:
        self.profiler = profiler
        self.run = run
        self.assumed: dict[str, str] = {}
        self._known: dict[str, OpBytes] = {}

    def __call__(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> OpBytes:
        if isinstance(op, torch._ops.OpOverload) and op.is_view:
            return OpBytes()
        name = signature(WrappedCall(op, args, kwargs, result))
        if name not in self._known:
            self._known[name] = self._look_up(op, args, kwargs, result)
        return self._known[name]

    def _look_up(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> OpBytes:
        node = _as_node(op, args, kwargs, result)
        profile = self.profiler.profiles([node], timed=False, run=self.run)[node]
        for given in node.graph.nodes:
            # A graph is a cycle: what it refers to would live until garbage is collected.
            given.meta.clear()
        if profile is None or profile.failure is not None:
            self.assumed[str(op)] = "it was not run" if profile is None else str(profile.failure)
            return OpBytes()
        return OpBytes(max(0, profile.workspace - profile.retained), profile.retained)


def _as_node(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
    """The call as a node of a graph of its own, which is what profiles are kept of."""
    graph = fx.Graph()
    placeholders: dict[int, fx.Node] = {}

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in placeholders:
            placeholders[id(value)] = graph.placeholder(f"x{len(placeholders)}")
            placeholders[id(value)].meta["val"] = value
        return placeholders[id(value)]

    given_args, given_kwargs = pytree.tree_map(given, (args, kwargs))
    node = graph.call_function(op, given_args, given_kwargs)
    node.meta["val"] = result
    return node
