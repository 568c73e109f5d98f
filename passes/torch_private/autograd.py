"""Private torch: the autograd node of a compiled call, what it holds, when it and backward run."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

_COMPILED: Final = "CompiledFunctionBackward"
"""AOTAutograd's class; others are the caller's."""


def backward_node(outputs: Any) -> object | None:
    """The autograd node of the compiled call that made ``outputs``, or None if none is recorded.

    The nearest: behind an output that is a view of an input lie nodes of other calls.
    """
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    pending = deque(t.grad_fn for t in tensors if isinstance(t, torch.Tensor))
    seen: set[Any] = {None}
    while pending:
        node: Any = pending.popleft()
        if node in seen:
            continue
        if isinstance(node, BackwardCFunction) and type(node).__name__ == _COMPILED:
            return node
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return None


def count_holding(nodes: Iterable[Any]) -> int:
    """How many of the nodes still hold what forward saved: their backward may still run."""
    return sum(_holds(node) for node in nodes)


def _holds(node: Any) -> bool:
    try:
        # Raises once a backward has freed them. Not `saved_tensors`: that unpacks each, through the
        # hooks of the caller, who may read a disk there or, in a checkpoint, run the forward again.
        node._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return False
    return True


def packs_saved_tensors() -> bool:
    """Whether hooks of the caller's pack what is saved (``torch.autograd.graph``)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is called with the tensor's gradient, or once that has been added up."""
    return bool(tensor._backward_hooks) or bool(
        tensor.is_leaf and getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def before_backward(node: Any, callback: Callable[[Sequence[Any]], None]) -> None:
    """Have ``callback`` called with the incoming gradients whenever the node's backward begins.

    A hook after it would hold those gradients while it runs, which costs memory; one before does
    not.
    """
    node.register_prehook(callback)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Inside a backward: have ``callback`` called once, when all its nodes have run."""
    Variable._execution_engine.queue_callback(callback)


def runs_backward() -> bool:
    """Whether a backward runs on this thread."""
    return int(torch._C._current_graph_task_id()) != -1


def when_backward_returns(callback: Callable[[], None]) -> None:
    """Inside a backward: have ``callback`` called once it has returned to its caller, or failed.

    A backward inside another one ends the watch early: ask :func:`runs_backward`.

    Inside, the engine restores the state of the thread, an ended profiler included. Its caller
    stashes a context for the time being, whose end is what is watched; where a torch does not, the
    callback is never called.
    """
    if not torch._C._is_key_in_tls("context"):
        return
    stashed = torch._C._get_obj_in_tls("context")
    if stashed is not None:
        weakref.finalize(stashed, callback).atexit = False
