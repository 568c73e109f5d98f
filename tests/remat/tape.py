"""A recorder without a GPU: what is recorded is run again, into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """The ops that ran, with the very tensors they read and made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs or {})):
                self.before.setdefault(_storage(tensor), (tensor, tensor.clone()))
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Recording runs nothing: what was written is as it was."""
        with torch.no_grad():
            for tensor, before in self.before.values():
                tensor.copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                given = {_storage(t) for t in _tensors((args, kwargs))}
                made = [t for t in _tensors(result) if _storage(t) not in given]
                if made or func._schema.is_mutable:
                    again = _tensors(func(*args, **kwargs))
                    for old, new in zip(_tensors(result), again, strict=True):
                        if _storage(old) not in given:
                            old.copy_(new)


class FakeRecorder:
    """Counts what it is asked for.

    Attributes:
        pools, warmed, recorded, replayed: how often.
        recorded_in: the pool of each recording.
    """

    def __init__(self) -> None:
        self.pools = self.warmed = self.replayed = 0
        self.recorded_in: list[int] = []

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.warmed += 1
        return function()

    def record(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        tape = Tape()
        state = torch.get_rng_state()
        with tape:
            result = function()
        tape.undo()
        torch.set_rng_state(state)
        self.recorded_in.append(pool)
        recorder = self

        class Counted:
            def replay(self) -> None:
                recorder.replayed += 1
                tape.replay()

        return result, Counted()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
