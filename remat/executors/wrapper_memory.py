"""Bytes alive during a replay: which storages exist, and what each counts.

Storages are those of fake tensors. They die when Python drops the last tensor over them, as the
real ones do, so that nothing here has to know what a statement frees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree


class OpBytes(NamedTuple):
    """What a library kernel takes beyond the storages of its result, in bytes.

    Attributes:
        workspace: while it runs.
        retained: as long as its result lives: a kernel may return it in a larger storage.
    """

    workspace: int = 0
    retained: int = 0


Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], OpBytes]
"""Called with op, fake arguments, keyword arguments and fake result of every library kernel."""


def no_workspace(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> OpBytes:
    """Library kernels take nothing beyond their result."""
    return OpBytes()


class Memory:
    """The storages on one kind of device, and the highest level they have reached.

    Args:
        granularity: the allocator hands out multiples of this many bytes.
        device_type: storages on other devices count nothing.

    Attributes:
        level: bytes alive.
        peak: the highest ``level`` since :meth:`reset_peak`, workspaces included.
    """

    def __init__(self, granularity: int, device_type: str) -> None:
        self.granularity = granularity
        self.device_type = device_type
        self.level = 0
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def own(self, value: Any) -> None:
        """The storages of ``value`` belong to the caller and count nothing."""
        for tensor in tensors_in(value):
            self._add(tensor.untyped_storage(), 0)

    def adopt(self, value: Any, retained: int = 0) -> None:
        """Count the storages of ``value`` that are new; the first takes ``retained`` more."""
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                counts = tensor.device.type == self.device_type
                self._add(storage, self.rounded(storage.nbytes() + retained) if counts else 0)
                retained = 0

    def work(self, workspace: int) -> None:
        """A kernel takes ``workspace`` bytes and gives them back."""
        self.peak = max(self.peak, self.level + workspace)

    def release(self) -> None:
        """Stop counting the storages that nothing refers to any more."""
        dead = [key for key, (storage, _) in self._alive.items() if storage.expired()]
        for key in dead:
            self.level -= self._alive.pop(key)[1]

    def reset_peak(self) -> None:
        """Begin to look for the highest level anew."""
        self.peak = self.level

    def bytes_of(self, value: Any) -> int:
        """What the storages of ``value`` count, each once."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}
        return sum(self._alive[key][1] for key in keys if key in self._alive)

    def rounded(self, size: int) -> int:
        """``size`` as the allocator hands it out."""
        return -(-size // self.granularity) * self.granularity

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        # The weak reference keeps the address from being given to another storage.
        self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), size))
        self.level += size
        self.peak = max(self.peak, self.level)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
