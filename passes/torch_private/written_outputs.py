"""Private torch: outputs of a compiled call that backward reads, and the caller writes into.

Autograd notices such a write by a counter that all views of a tensor share. What a compiled forward
returns and what it saves may lie in one memory and share none: inductor makes them apart
(``reinterpret_tensor``), AOTAutograd cuts the tie (``_unsafe_view``). Then the gradients would be
those of the new content, without a word.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import _unsafe_preserve_version_counter as _same_version

from remat.passes.torch_private.autograd import backward_node, packs_saved_tensors


class WrittenOutputs:
    """Watches the outputs of one graph; which share memory is known from its first call."""

    def __init__(self) -> None:
        self._shared: tuple[int, ...] | None = None

    def watch(self, outputs: Any) -> None:
        """Let backward raise what autograd raises, should one be written into before."""
        flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
        if self._shared == ():
            return
        node: Any = backward_node(outputs)
        if node is None or packs_saved_tensors():
            return  # what the caller packs is a copy, or the caller's
        if self._shared is None:
            self._shared = _shared(flat, node)
        probes = [(_probe(flat[index]), flat[index]) for index in self._shared]
        if probes:
            told = [(probe, output._version, tuple(output.shape)) for probe, output in probes]
            node.register_prehook(partial(_check, told))


def _shared(outputs: Any, node: Any) -> tuple[int, ...]:
    saved = {_memory(tensor) for tensor in node.saved_tensors if tensor is not None}
    return tuple(
        index
        for index, output in enumerate(outputs)
        if isinstance(output, torch.Tensor) and output.requires_grad and _memory(output) in saved
    )


def _memory(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _probe(output: torch.Tensor) -> torch.Tensor:
    """A tensor with the counter of ``output``, and none of its memory."""
    probe = output.detach()
    with torch.no_grad(), _same_version(probe):
        probe.set_(torch.empty(0, dtype=output.dtype, device=output.device))  # type: ignore[call-overload]
    return probe


def _check(told: list[tuple[torch.Tensor, int, tuple[int, ...]]], _: Any) -> None:
    for probe, version, shape in told:
        if probe._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: an output of a compiled call, of shape {shape}, is at version "
                f"{probe._version}; expected version {version} instead. Backward reads its memory: "
                "write into a copy of it (output.clone())"
            )
