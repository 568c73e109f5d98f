"""Private torch: a second backward through a compiled call, told apart from the first.

AOTAutograd's graphs hold one backward. Its gradients do get a ``grad_fn`` under
``create_graph=True``, a node whose backward raises torch's own error, deep in the engine. What
stands here lets the caller speak before that node does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat.passes.torch_private.autograd import backward_node


def on_double_backward(outputs: Any, say: Callable[[], None]) -> None:
    """Call ``say`` when backward is about to go through the gradients of a compiled call.

    Args:
        outputs: what the compiled call returned.
        say: raises, or returns to let torch raise its own error.
    """
    node: Any = backward_node(outputs)
    if node is not None:
        weak = weakref.ref(node)
        node.register_prehook(lambda _: _before_backward(weak, say))


def _before_backward(weak: weakref.ref[Any], say: Callable[[], None]) -> None:
    # A hook after backward holds the gradients that arrive while it runs: only under create_graph,
    # which is when gradients are on in here, is there one.
    node = weak()
    if torch.is_grad_enabled() and node is not None:
        node.register_hook(lambda gradients, _: _watch(gradients, say))


def _watch(gradients: tuple[torch.Tensor | None, ...], say: Callable[[], None]) -> None:
    seconds = {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}
    for node in seconds:
        node.register_prehook(lambda _: say())
