"""Where values of a device are offloaded to, one tier for each place and device of a process.

Who may still run a graph that offloads holds its tiers (:func:`hold`), and so does every stored
value. When the last of them is gone the file is closed, or the pinned memory freed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch

from remat.passes.disk import Disk
from remat.passes.transfers import Tier
from remat.solvers.errors import RematError

HOST: Final = "host"
"""The name of the tier in pinned host memory; any other name is a directory."""


class JoinedTier(Tier, Protocol):
    """A tier whose copies a CUDA graph can record."""

    def join(self) -> None:
        """Have the current stream wait for every copy; what it queues next comes after them all."""


class OwnTiers:
    """The tiers of one recording, which nobody else puts values on.

    A replay copies to and from the very rooms that were there when it was recorded, without asking
    anybody: a room that another step has taken meanwhile would be written over.

    Args:
        make: makes one for values of a device.
    """

    def __init__(self, make: Callable[[torch.device], JoinedTier]) -> None:
        self._make = make
        self._tiers: dict[torch.device, JoinedTier] = {}

    def tier(self, where: str, device: torch.device) -> JoinedTier:
        """That of a device.

        Raises:
            RematError: ``where`` is not the host's memory.
        """
        if where != HOST:
            raise RematError(
                f"a CUDA graph cannot record copies to {where!r}, only to host memory; write "
                f'offload="{HOST}"'
            )
        if device not in self._tiers:
            self._tiers[device] = self._make(device)
        return self._tiers[device]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """What is offloaded inside goes to these tiers, and every copy is waited for at the end."""
        before = _OWN.set(self)
        try:
            yield
            self.join()
        finally:
            _OWN.reset(before)

    def join(self) -> None:
        """See :class:`JoinedTier`."""
        for tier in self._tiers.values():
            tier.join()


_OWN: Final[ContextVar[OwnTiers | None]] = ContextVar("remat_own_tiers", default=None)
_LOCK: Final = threading.RLock()
_TIERS: Final[weakref.WeakValueDictionary[tuple[Any, ...], Tier]] = weakref.WeakValueDictionary()


def tier_for(where: str, device: torch.device) -> Tier:
    """The tier of that name, made if there is none; inside :class:`OwnTiers`, one of those.

    Args:
        where: ``"host"``, or a directory.
        device: where the values come from.

    Raises:
        RematError: it cannot be made, or values of this device cannot be put there.
    """
    own = _OWN.get()
    if own is not None:
        return own.tier(where, device)
    # A process that was forked has no threads of its parent's.
    key = os.getpid(), where, device.type, device.index
    with _LOCK:
        tier = _TIERS.get(key)
        if tier is None:
            tier = _TIERS[key] = _new_tier(where, device)
    return tier


def hold(where: str, device: torch.device, sizes: Iterable[int]) -> Tier:
    """The tier, with room for values of these sizes in bytes; it stays while the answer is held.

    Raises:
        RematError: see :func:`tier_for`; or there is not enough room.
    """
    tier = tier_for(where, device)
    tier.reserve(sizes)
    return tier


def put_in_place(where: str, device: torch.device, tier: Tier) -> None:
    """Have :func:`tier_for` answer with ``tier`` while the caller holds it."""
    _TIERS[os.getpid(), where, device.type, device.index] = tier


def _new_tier(where: str, device: torch.device) -> Tier:
    if device.type == "cpu" and where != HOST:
        return Disk(where)
    if device.type == "cuda":
        from remat.passes import pinned

        return pinned.Pinned(device) if where == HOST else pinned.StagedDisk(where, device)
    raise RematError(
        f"values on {str(device)!r} cannot be offloaded to {where!r}: host memory takes those of "
        "cuda, a directory those of cpu and cuda"
    )
