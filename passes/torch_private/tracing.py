"""Private torch: a function that computes gradients inside, traced into one functional graph.

Two passes of torch's tracer: the first runs the function, its autograd and its in-place writes on
fake tensors; the second makes the graph functional, so that every write into an input is one
``copy_`` at the end. What the first pass knows of a node (whether autograd ran, which module) is
stamped on it and carried over.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

SPAN: Final = "remat_span"
"""Node metadata: when the node was traced, one of ``"forward"`` (before the first backward),
``"backward"`` (inside one), ``"after"``."""

DEPENDS_ON_DATA: Final = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""What tracing raises where the function asks a tensor for its content."""

_NOT_THE_CALLERS: Final = (
    os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__),
)  # fmt: skip
_COPIED: Final = (SPAN, "nn_module_stack", "stack_trace")


def trace_functional(
    function: Callable[..., Any], inputs: Sequence[Any], paths: dict[nn.Module, str]
) -> fx.GraphModule:
    """``function(*inputs)`` as a graph of ATen ops; writes into inputs are ``copy_`` at its end.

    Args:
        inputs: fake tensors of one mode.
        paths: the path of every module that may be called, for ``nn_module_stack``.
    """
    marker = _Marker(paths)
    # On a device backward would run in a thread of the engine's, and be nobody's that is watched.
    here = torch.autograd.set_multithreading_enabled(False)
    with here, preserve_node_meta(), enable_python_dispatcher(), marker.hooks():
        traced = make_fx(
            marker.watched(function),
            tracing_mode="fake",
            record_stack_traces=True,
            _error_on_data_dependent_ops=False,
        )(*inputs)
    _drop_profiling(traced)
    interpreter = _Stamping(traced)

    def run(*args: Any) -> Any:
        return interpreter.run(*args)

    plain = [item.detach() if isinstance(item, torch.Tensor) else item for item in inputs]
    with enable_python_dispatcher():
        functional: fx.GraphModule = make_fx(
            torch.func.functionalize(run, remove="mutations"),
            tracing_mode="fake",
            _error_on_data_dependent_ops=False,
        )(*plain)
    return functional


@contextlib.contextmanager
def _autocast_cache() -> Iterator[None]:
    """As outside of a trace: a weight that is used twice is cast once."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of static shape; two of one real tensor are one."""
    return mode.from_tensor(tensor, static_shapes=True)


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Around the run of a traced graph: its casts are in it, and its autograd is."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


class _Marker(TorchFunctionMode):
    """Stamps the nodes of the trace as they come: the span, the modules that are running, and the
    line of the caller's where torch has noted none (it notes those inside of modules).
    """

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        super().__init__()
        self._paths = paths
        self._span = "forward"
        self._running: list[nn.Module] = []
        self._last: fx.Node | None = None
        self._thread = threading.get_ident()

    @property
    def _elsewhere(self) -> bool:
        """In another thread, which has nothing to do with the trace."""
        return threading.get_ident() != self._thread

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, called inside the trace."""

        def call(*args: Any) -> Any:
            # Whoever asks for gradients (grad, backward, Tensor.backward) comes through here.
            engine = torch.autograd._engine_run_backward
            torch.autograd._engine_run_backward = self._backward_by(engine)
            try:
                with self, _autocast_cache():
                    result = function(*args)
            finally:
                torch.autograd._engine_run_backward = engine
            self._stamp()
            return result

        return call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if get_proxy_mode() is None:  # the tracer itself calls ops
            return func(*args, **(kwargs or {}))
        before = _last_node()
        result = func(*args, **(kwargs or {}))
        for node in _new_nodes(before):
            if self._span != "backward" and not node.meta.get("stack_trace"):
                node.meta["stack_trace"] = _line_of_caller()
        return result

    def _backward_by(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere:
                return engine(*args, **kwargs)
            self._stamp()
            self._span = "backward"
            result = engine(*args, **kwargs)
            self._stamp()
            self._span = "after"
            return result

        return run

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Watching which module runs."""

        def enter(module: nn.Module, _: Any) -> None:
            if not self._elsewhere:
                self._stamp()
                self._running.append(module)

        def leave(module: nn.Module, *_: Any) -> None:
            if not self._elsewhere:
                self._stamp()
                self._running.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _stamp(self) -> None:
        """Mark all nodes since the last time."""
        stack = {
            str(depth): (self._paths[module], type(module))
            for depth, module in enumerate(self._running)
            if self._paths.get(module)
        }
        for node in _new_nodes(self._last):
            node.meta[SPAN] = self._span
            if stack and self._span == "forward":
                node.meta["nn_module_stack"] = stack
            self._last = node


class _Stamping(fx.Interpreter):
    """Runs a graph inside another trace, and stamps the nodes that come of each of its own."""

    def run_node(self, n: fx.Node) -> Any:
        last = _last_node()
        result = super().run_node(n)
        for node in _new_nodes(last):
            node.meta.update({key: n.meta[key] for key in _COPIED if key in n.meta})
        return result


def _line_of_caller() -> str:
    """The innermost line that is neither torch's nor ours, as a traceback has it."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_NOT_THE_CALLERS)):
            return f'  File "{path}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _last_node() -> fx.Node | None:
    mode = get_proxy_mode()
    assert mode is not None, "inside a trace"
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def _new_nodes(after: fx.Node | None) -> Iterator[fx.Node]:
    """The nodes of the running trace that come after ``after``."""
    newest = _last_node()
    found: list[fx.Node] = []
    while newest is not None and newest is not after and newest.op != "root":
        found.append(newest)
        newest = newest.prev
    yield from reversed(found)


def _drop_profiling(traced: fx.GraphModule) -> None:
    for node in reversed(traced.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler":
            traced.graph.erase_node(node)
    traced.recompile()
