"""Private torch: the autograd node of a compiled call, and whether it still holds its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def backward_node(outputs: Any) -> object | None:
    """The autograd node of the compiled call that made ``outputs``, or None if none is recorded."""
    tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
    pending = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while pending:
        node: Any = pending.pop()
        if isinstance(node, BackwardCFunction):
            return node
        pending.extend(following for following, _ in node.next_functions if following is not None)
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
