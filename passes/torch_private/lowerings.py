"""Private torch: which ops inductor generates code for. Importing this costs seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import lowering as _lowering

_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default, torch.ops.aten.convolution.default,
    }
)  # fmt: skip
# Generated, though inductor wants their inputs stored.
_WINDOWS = ("pool", "upsample")


def is_library_call(node: fx.Node) -> bool:
    """Whether inductor calls a library, or the op itself, for the node."""
    target: Any = node.target
    if target in _PRODUCTS or target in _lowering.fallbacks:
        return True
    if target not in _lowering.lowerings:
        return True
    wants_stored = target in _lowering.needs_realized_inputs
    return wants_stored and not any(word in str(target) for word in _WINDOWS)
