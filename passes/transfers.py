"""Values on their way to another tier and back: what emitted graphs call.

Four ops, called ``torch.ops.remat.…``::

    token = offload(value, where, whole)      starts the copy
    wait_offload(token, value)                the copy has ended: the value may be dropped
    value = reload(token, size, stride, …)    allocates the value and starts to fill it
    wait_reload(token, value)                 it is filled: whoever reads it comes after this

What forward hands to backward is the *token*, a tensor of one number that AOTAutograd saves like
any other. Its storage owns what is stored: when the last tensor over it dies (a backward that
nobody retains has ended, a graph was dropped, an error came), the room goes back to its tier. So
what is stored lives exactly as long as what autograd saved, and every forward has its own.

Both waits say that they write into an argument: no compiler may drop them, or move a reader of a
value before them. Values in flight are held here as well, so that memory a queue still works on
is never handed out again, whatever a graph drops.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from remat.solvers.errors import RematError


class Flight(Protocol):
    """A copy on its way; it holds the memory it works on."""

    def finish(self) -> None:
        """Return when the copy has ended, or what reads the memory next will wait for it.

        Raises:
            RematError: it failed.
        """

    def abandon(self) -> None:
        """Nobody wants it any more: let go of the memory as soon as that is safe."""


class Tier(Protocol):
    """Where values are put. A room is the tier's own notion of a place."""

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have a room ready for each of these numbers of bytes.

        Raises:
            RematError: there is not enough room.
        """

    def take(self, size: int) -> Any:
        """A room of ``size`` bytes."""

    def give(self, room: Any) -> None:
        """A room that nobody needs any more; what is read from it has been waited for."""

    def write(self, room: Any, memory: torch.Tensor) -> Flight:
        """Start to copy ``memory`` (contiguous bytes) into a room."""

    def read(self, room: Any, memory: torch.Tensor) -> Flight:
        """Start to fill ``memory`` from a room that was written."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor lies in the bytes that are stored; ``offset`` in elements."""

    bytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Stored:
    """A value on a tier, from the start of its copy until nobody can read it any more."""

    def __init__(self, tier: Tier, value: torch.Tensor, whole: bool) -> None:
        self.process = os.getpid()
        self.tier = tier
        self.token_address = 0
        memory, self.layout = _bytes_of(value, whole)
        self.room = tier.take(self.layout.bytes)
        self._writing: Flight | None = tier.write(self.room, memory)
        self._reading: dict[int, Flight] = {}

    def finish_writing(self) -> None:
        """See ``Flight.finish``."""
        if self._writing is not None:
            self._writing.finish()
            self._writing = None

    def start_reading(self) -> torch.Tensor:
        """A fresh tensor like the value; its content is there after :meth:`finish_reading`."""
        self._refuse_other_process()
        # A copy that failed, or was never waited for, must not be read.
        self.finish_writing()
        layout = self.layout
        memory = torch.empty(layout.bytes, dtype=torch.uint8, device=layout.device)
        value = torch.empty(0, dtype=layout.dtype, device=layout.device).set_(
            memory.untyped_storage(), layout.offset, layout.size, layout.stride
        )
        self._reading[memory.data_ptr()] = self.tier.read(self.room, memory)
        return value

    def finish_reading(self, value: torch.Tensor) -> None:
        """Of the tensor that :meth:`start_reading` returned; see ``Flight.finish``."""
        address = value.untyped_storage().data_ptr()
        flight = self._reading.get(address)
        if flight is None:
            raise RematError("waited for a reload that was never started; report this")
        flight.finish()
        del self._reading[address]

    def close(self) -> None:
        """Nobody can read it any more."""
        if self.process != os.getpid():
            return  # the queues, and whoever waits for them, are in the process that forked
        for flight in (*self._reading.values(), self._writing):
            if flight is not None:
                flight.abandon()
        self._reading.clear()
        self._writing = None
        self.tier.give(self.room)

    def _refuse_other_process(self) -> None:
        if self.process != os.getpid():
            raise RematError(
                f"backward runs in process {os.getpid()}, but its forward offloaded values in "
                f"process {self.process}: run both in one process"
            )


def _bytes_of(value: torch.Tensor, whole: bool) -> tuple[torch.Tensor, _Layout]:
    """The memory to store, as bytes: all of the value's storage, or what the value spans of it."""
    storage, width = value.untyped_storage(), value.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    first = 0 if whole else value.storage_offset() * width
    count = storage.nbytes() if whole else span * width
    memory = torch.empty(0, dtype=torch.uint8, device=value.device).set_(
        storage, first, (count,), (1,)
    )
    layout = _Layout(
        bytes=count,
        offset=int(value.storage_offset()) if whole else 0,
        size=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        device=value.device,
    )
    return memory, layout


_STORED: Final[dict[int, Stored]] = {}
_NUMBERS: Final = itertools.count(1)


def stored_count() -> int:
    """How many values are stored in this process, on whatever tier."""
    return len(_STORED)


def _token(stored: Stored) -> torch.Tensor:
    """A tensor whose storage owns ``stored``."""
    # Numbers are never used twice, so a stale one finds nothing rather than another value.
    array = np.array([next(_NUMBERS)], dtype=np.int64)
    number = int(array[0])
    _STORED[number] = stored
    stored.token_address = array.ctypes.data
    # At the end of the process everything goes anyway, and queues may be gone already.
    weakref.finalize(array, _release, number).atexit = False
    return torch.from_numpy(array)


def is_token(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the token of a stored value."""
    if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.numel() != 1:
        return False
    stored = _STORED.get(int(tensor.item()))
    return stored is not None and stored.token_address == tensor.data_ptr()


def _release(number: int) -> None:
    stored = _STORED.pop(number, None)
    if stored is not None:
        stored.close()


def _stored_by(token: torch.Tensor) -> Stored:
    found = _STORED.get(int(token.item()))
    if found is None:
        raise RematError(
            "backward wants an offloaded value whose token is gone: something copied what the "
            "compiled step saves for backward and dropped the original (saved_tensors_hooks such "
            "as save_on_cpu do); leave that out, or leave offload= out"
        )
    return found


def _offload(value: torch.Tensor, where: str, whole: bool) -> torch.Tensor:
    # Not imported above: tiers raise, and are tested, without the ops.
    from remat.passes.tiers import tier_for

    return _token(Stored(tier_for(where, value.device), value, whole))


def _wait_offload(token: torch.Tensor, value: torch.Tensor) -> None:
    _stored_by(token).finish_writing()


def _reload(
    token: torch.Tensor, size: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return _stored_by(token).start_reading()


def _wait_reload(token: torch.Tensor, value: torch.Tensor) -> None:
    _stored_by(token).finish_reading(value)


def _nothing(*_: Any) -> None:
    """A wait of fake tensors."""


_LIBRARY: Final = torch.library.Library("remat", "DEF")
_SCHEMAS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "offload(Tensor value, str where, bool whole) -> Tensor": (
        _offload,
        lambda value, where, whole: torch.empty(1, dtype=torch.int64),
    ),
    "wait_offload(Tensor(a!) token, Tensor value) -> ()": (_wait_offload, _nothing),
    "reload(Tensor token, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device)"
    " -> Tensor": (
        _reload,
        lambda token, size, stride, dtype, device: torch.empty_strided(
            size, stride, dtype=dtype, device=device
        ),
    ),
    "wait_reload(Tensor token, Tensor(a!) value) -> ()": (_wait_reload, _nothing),
}


def _register() -> None:
    for schema, (run, fake) in _SCHEMAS.items():
        name = schema.split("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"remat::{name}", fake, lib=_LIBRARY)


_register()
