"""A recorder without a GPU: what is recorded is run again, into the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        if func.namespace == "remat":
            return func(*args, **(kwargs or {}))  # what its tier copies is recorded, not its call
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


class Copying:
    """A copy that was asked for, and happens when it is waited for, as late as it may."""

    def __init__(self, tier: HostTier, target: torch.Tensor, source: torch.Tensor) -> None:
        self.tier, self.target, self.source = tier, target, source
        self.ended = False

    def finish(self) -> None:
        if not self.ended:
            # Below the tape, as ops of a custom op are: it is told by hand.
            with torch._C._DisableTorchDispatch():
                self.target.copy_(self.source)
            if self.tier.tape is not None:
                copy = torch.ops.aten.copy_.default
                self.tier.tape.calls.append((copy, (self.target, self.source), {}, self.target))
            self.tier.flights.remove(self)
        self.ended = True

    abandon = finish


class HostTier:
    """Buffers as :class:`remat.passes.pinned.Pinned` has them, and what it must not be asked for.

    Attributes:
        tape: of the recording that goes on.
        made: buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.tape: Tape | None = None
        self.made = 0
        self.free: dict[int, list[torch.Tensor]] = {}
        self.flights: list[Copying] = []

    def reserve(self, sizes: Any) -> None:
        for room in [self.take(size) for size in sizes]:
            self.give(room)

    def take(self, size: int) -> torch.Tensor:
        if self.free.get(size):
            return self.free[size].pop()
        assert self.tape is None, "memory cannot be pinned while a graph is recorded"
        self.made += 1
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def give(self, room: torch.Tensor) -> None:
        self.free.setdefault(room.numel(), []).append(room)

    def write(self, room: torch.Tensor, memory: torch.Tensor) -> Copying:
        return self._copy(room, memory)

    def read(self, room: torch.Tensor, memory: torch.Tensor) -> Copying:
        return self._copy(memory, room)

    def join(self) -> None:
        for flight in list(self.flights):
            flight.finish()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Copying:
        self.flights.append(Copying(self, target, source))
        return self.flights[-1]


class FakeRecorder:
    """Counts what it is asked for.

    Attributes:
        pools, warmed, recorded, replayed: how often.
        recorded_in: the pool of each recording.
        tiers: those it made.
    """

    def __init__(self) -> None:
        self.pools = self.warmed = self.replayed = 0
        self.recorded_in: list[int] = []
        self.tiers: list[HostTier] = []
        self.generators: list[torch.Generator] = []

    def register(self, generators: Sequence[torch.Generator]) -> None:
        self.generators += generators

    def new_tier(self, device: torch.device) -> HostTier:
        self.tiers.append(HostTier(device))
        return self.tiers[-1]

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def warm_up(self, function: Callable[[], Any]) -> Any:
        self.warmed += 1
        return function()

    def record(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        tape = Tape()
        state = torch.get_rng_state()
        states = [generator.get_state() for generator in self.generators]
        for tier in self.tiers:
            assert not tier.flights, "a recording cannot wait for what was queued before it"
            tier.tape = tape
        with tape:
            result = function()
        for tier in self.tiers:
            assert not tier.flights, "a stream of a recording was not joined"
            tier.tape = None
        tape.undo()
        torch.set_rng_state(state)
        for generator, before in zip(self.generators, states, strict=True):
            generator.set_state(before)
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
