"""Private torch: memory that a recorded graph lends, and which inputs of a graph stay in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without keeping it allocated.

    For memory of a recorded graph's pool: that the graph is alive keeps it mapped, and the order of
    replays says what lies in it.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    with torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            alias, tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def static_inputs() -> frozenset[int]:
    """While AOTAutograd compiles a forward: the inputs that are parameters or buffers."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)


def boxed(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Any]:
    """``function``, marked as one that takes its arguments in a list, and empties it."""

    def call(given: list[Any]) -> Sequence[Any]:
        return function(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
