"""Private torch: what Dynamo says about a captured graph, and copying a model onto fake tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import Unsupported as Unsupported
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True)
class Break:
    """Where and why a graph ended before its function did."""

    line: str
    reason: str


def break_reason(graph: fx.GraphModule) -> Break | None:
    """The graph break that ended ``graph``, or None if it holds its whole function."""
    found = getattr(graph, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    stack = list(found.user_stack or [])
    line = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
    source = f" `{stack[-1].line}`" if stack and stack[-1].line else ""
    return Break(line + source, str(found.reason).strip().split("\n")[0])


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """A tracing context of its own for AOTAutograd when Dynamo is not compiling."""
    if TracingContext.try_get() is not None:
        yield
        return
    # Without a shape environment every size is static.
    with tracing(TracingContext(FakeTensorMode())):
        yield


def fake_mode() -> FakeTensorMode:
    """A mode for fake tensors; Dynamo needs its shape environment even for static shapes."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake_copy(mode: FakeTensorMode, model: torch.nn.Module, inputs: Any) -> tuple[Any, Any]:
    """Copies of a module and nested inputs on fake tensors of static shapes; allocates nothing."""
    with FakeCopyMode(mode):
        fake_model = copy.deepcopy(model)

    def fake(item: Any) -> Any:
        return (
            mode.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) else item
        )

    return fake_model, torch.utils._pytree.tree_map(fake, inputs)
