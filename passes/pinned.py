"""Tiers of CUDA devices: pinned host memory, and a file behind it.

Copies run on two streams beside the one that computes, one each way. What orders them::

    offload   the copy waits for the stream that computed the value, and for a copy that may still
              read what was in its room before
    wait      the computing stream waits for the copy; only then may the value's memory, which
              belongs to that stream, be given to somebody else
    reload    the copy waits for the computing stream, whose memory it fills, and for the copy that
              wrote the room
    wait      the computing stream waits for the copy

So ``record_stream`` is not needed, which would hold memory for longer than the plan says.

While a CUDA graph is recorded, the first of these edges takes the copying stream into the recording
(it forks), and the wait takes it back. A recording must end with all of its streams taken back, and
may wait for no event of another one: :meth:`Pinned.join` before its end sees to both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from remat.passes.disk import DiskFile, Queue, abandon, new_queue
from remat.passes.disk import Room as DiskRoom
from remat.solvers.errors import RematError
from remat.solvers.units import format_bytes


@dataclass(eq=False)
class Room:
    """A pinned buffer, and the event after the latest copy from or to it."""

    buffer: torch.Tensor
    event: Any = None


@dataclass(eq=False)
class _Flight:
    """``event`` is None once somebody has waited for it."""

    device: torch.device
    event: Any
    memory: torch.Tensor | None

    def finish(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
        self.event = self.memory = None

    def abandon(self) -> None:
        if self.event is not None:
            # Which stream gets the memory next is not known here.
            self.event.synchronize()
        self.event = self.memory = None


class Pinned:
    """The tier in pinned host memory: buffers by size, reused from step to step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[Room]] = {}
        self._rooms: list[Room] = []
        self._flights: weakref.WeakSet[_Flight] = weakref.WeakSet()
        self._latest: dict[Any, Any] = {}

    def reserve(self, sizes: Iterable[int]) -> None:
        """See ``transfers.Tier``."""
        for room in [self.take(size) for size in sizes]:
            self.give(room)

    def take(self, size: int) -> Room:
        """See ``transfers.Tier``."""
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            pass
        try:
            room = Room(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise RematError(
                f"offloading to host memory: {format_bytes(size)} more cannot be pinned ({error}); "
                "raise the limit of locked memory (ulimit -l), offload to a directory instead, or "
                "give a larger memory_budget"
            ) from error
        self._rooms.append(room)
        return room

    def give(self, room: Room) -> None:
        """See ``transfers.Tier``."""
        self._free.setdefault(room.buffer.numel(), []).append(room)

    def write(self, room: Room, memory: torch.Tensor) -> _Flight:
        """See ``transfers.Tier``."""
        return self._copy(self._out, room, room.buffer, memory, memory)

    def read(self, room: Room, memory: torch.Tensor) -> _Flight:
        """See ``transfers.Tier``."""
        return self._copy(self._in, room, memory, room.buffer, memory)

    def join(self) -> None:
        """Have the current stream wait for every copy; what it queues next comes after them all."""
        for event in self._latest.values():
            torch.cuda.current_stream(self.device).wait_event(event)
        self._latest.clear()
        for flight in list(self._flights):
            flight.event = flight.memory = None
        for room in self._rooms:
            room.event = None

    def _copy(
        self,
        stream: Any,
        room: Room,
        target: torch.Tensor,
        source: torch.Tensor,
        memory: torch.Tensor,
    ) -> _Flight:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if room.event is not None:
            stream.wait_event(room.event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            room.event = stream.record_event()
        flight = _Flight(self.device, room.event, memory)
        self._flights.add(flight)
        self._latest[stream] = room.event
        return flight


@dataclass
class _DiskFlight:
    """A copy between the device and a file; the thread that makes it ends it as a whole."""

    device: torch.device
    future: Future[None]
    event: Any
    memory: torch.Tensor | None

    def finish(self) -> None:
        error = self.future.exception()
        if error is not None:
            raise RematError(str(error)) from error
        torch.cuda.current_stream(self.device).wait_event(self.event)
        self.memory = None

    def abandon(self) -> None:
        abandon(self.future, self.memory)
        self.event.synchronize()
        self.memory = None


class StagedDisk:
    """The tier in a file, through pinned buffers: one while it is written, one while it is read."""

    def __init__(
        self,
        directory: str,
        device: torch.device,
        queues: Callable[[str], Queue] = new_queue,
    ) -> None:
        self.device = device
        self.file = DiskFile(directory)
        self._pinned = Pinned(device)
        self._writes, self._reads = queues("offload"), queues("reload")

    def reserve(self, sizes: Iterable[int]) -> None:
        """See ``transfers.Tier``."""
        self.file.reserve(sizes)

    def take(self, size: int) -> DiskRoom:
        """See ``transfers.Tier``."""
        return self.file.take(size)

    def give(self, room: DiskRoom) -> None:
        """See ``transfers.Tier``."""
        self.file.give(room)

    def write(self, room: DiskRoom, memory: torch.Tensor) -> _DiskFlight:
        """See ``transfers.Tier``."""
        before = torch.cuda.current_stream(self.device).record_event()
        job = self._write, room, memory, before
        return _DiskFlight(self.device, self._writes.submit(*job), before, memory)

    def read(self, room: DiskRoom, memory: torch.Tensor) -> _DiskFlight:
        """See ``transfers.Tier``."""
        before = torch.cuda.current_stream(self.device).record_event()
        job = self._read, room, memory, before
        return _DiskFlight(self.device, self._reads.submit(*job), before, memory)

    def _write(self, room: DiskRoom, memory: torch.Tensor, before: Any) -> None:
        staged = self._pinned.take(memory.numel())
        try:
            self._copy(staged.buffer, memory, before)
            self.file.write(room, staged.buffer.data_ptr(), memory.numel())
        finally:
            self._pinned.give(staged)

    def _read(self, room: DiskRoom, memory: torch.Tensor, before: Any) -> None:
        staged = self._pinned.take(memory.numel())
        try:
            self.file.read(room, staged.buffer.data_ptr(), memory.numel())
            self._copy(memory, staged.buffer, before)
        finally:
            self._pinned.give(staged)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, before: Any) -> None:
        """Copy after ``before``, on a stream of this thread's, to the end."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()
