"""Private torch: what Dynamo says about a captured graph, and copying a model onto fake tensors."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import convert_frame
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.utils import counters, preserve_rng_state
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
    return _break(found.user_stack, found.reason)


def break_of(error: Unsupported) -> Break:
    """What the error says that Dynamo raises when it may not break a graph."""
    return _break(getattr(error, "real_stack", None), error)


def _break(stack: Any, reason: object) -> Break:
    last = list(stack)[-1] if stack else None
    line = f"{last.filename}:{last.lineno}" if last else "an unknown line"
    source = f" `{last.line}`" if last and last.line else ""
    return Break(line + source, str(reason).strip().split("\n")[0])


def graph_breaks() -> Counter[str]:
    """How often each reason has broken a graph in this process.

    A break inside a loop, or under a backward hook of a module, leaves graphs that say nothing of
    it: Dynamo compiles the inner functions one by one, or not at all.
    """
    return Counter({str(reason).split("\n")[0]: n for reason, n in counters["graph_break"].items()})


@contextlib.contextmanager
def outside_compilation() -> Iterator[None]:
    """A tracing context of its own for AOTAutograd when Dynamo is not compiling.

    The random states are kept, as Dynamo keeps them: a graph that is compiled again in the middle
    of a step must draw what it would have drawn.
    """
    if TracingContext.try_get() is not None:
        yield
        return
    drawn = random.getstate()
    # Without a shape environment every size is static.
    with preserve_rng_state(), tracing(TracingContext(FakeTensorMode())):
        try:
            yield
        finally:
            random.setstate(drawn)


def turns() -> contextlib.AbstractContextManager[Any]:
    """The lock under which Dynamo compiles, one thread at a time; it may be taken again."""
    return convert_frame.compile_lock


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` runs as it is where a compiler meets it; what is compiled inside stays so."""
    decorated: Callable[..., Any] = torch._dynamo.disable(function)
    return decorated


def is_compiled(model: object) -> bool:
    """Whether torch has compiled it: by ``torch.compile``, or in place by its own ``compile``."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return True
    return isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None


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
