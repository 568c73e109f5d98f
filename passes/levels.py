"""How far the bytes in use rise between marks: what one step holds, phase by phase.

Beside :class:`remat.passes.allocations.Allocations`, which has one figure for a whole block, this
recording begins and ends in different calls, and marks are left in it from inside a backward.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from remat.passes.torch_private import profiling


@dataclass
class Segment:
    """What happened from one mark to the next, in bytes over the level at the start.

    Attributes:
        level: at its mark.
        peak: highest level reached before the next mark, at least ``level``.
    """

    level: int
    peak: int


class Levels:
    """A recording of the bytes in use on one device, from :meth:`start` to :meth:`stop`.

    On the CPU the allocator's events of this thread are summed, as ``Allocations`` does, and with
    the same limit: the release of what was allocated before is not seen. On CUDA the caching
    allocator's counters are read; its peak counters are reset.

    torch binds the recording on the CPU to the thread that began it, and only that thread can end
    it: one that another thread wanted to end is lost, and ends when its own thread next begins or
    makes way for another.

    Attributes:
        running: between start and stop.
        lost: it ended before its time, and says nothing.
        segments: one for each mark; on the CPU complete only after :meth:`stop`.
    """

    def __init__(self, device: torch.device, level: int = 0) -> None:
        self.device = device
        self.running = False
        self.lost = False
        self.segments: list[Segment] = []
        self._thread = 0
        self._level = level
        self._base = 0
        self._open: Segment | None = None  # the segment that lasts

    def start(self) -> bool:
        """Begin, or go on after an interruption; False if somebody else's profiler runs."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device) - self._level
        elif self.lost or self.device.type != "cpu" or _is_taken():
            return False
        else:
            profiling.start_memory_events(self)
            self._thread = threading.get_ident()
        self.running = True
        return True

    def make_way(self) -> None:
        """End for good, on the thread of the recording, because another one wants to begin."""
        self.lost, self.running = True, False
        profiling.stop_events()

    def _is_foreign(self) -> bool:
        """Whether this is another thread than the recording's."""
        if self.device.type == "cpu" and self._thread != threading.get_ident():
            self.lost, self.running = True, False
        return self.lost

    def mark(self) -> int:
        """Begin a segment; answers its index. What is lost is marked without a level."""
        if self.device.type == "cuda":
            self._read_counters()
            self._open = Segment(self._level, self._level)
            self.segments.append(self._open)
            return len(self.segments) - 1
        self.segments.append(Segment(0, 0))
        if self._is_foreign():
            return len(self.segments) - 1
        profiling.mark(str(len(self.segments) - 1))
        return len(self.segments) - 1

    def stop(self) -> None:
        """End the recording, or interrupt it: what is allocated until :meth:`start` is not counted.

        Not inside a backward: the engine would start the profiler again.
        """
        if not self.running or self._is_foreign():
            return
        self.running = False
        if self.device.type == "cuda":
            self._read_counters()
            return
        events = profiling.stop_events()
        if events is None:
            self.lost = True
            return
        for event in events:
            if isinstance(event, profiling.Mark):
                self._open = self.segments[int(event.name)]
                self._open.level = self._open.peak = self._level
            else:
                self._rise_to(self._level + event.bytes)

    def _rise_to(self, level: int) -> None:
        self._level = level
        if self._open is not None:
            self._open.peak = max(self._open.peak, level)

    def _read_counters(self) -> None:
        self._rise_to(torch.cuda.max_memory_allocated(self.device) - self._base)
        self._level = torch.cuda.memory_allocated(self.device) - self._base
        torch.cuda.reset_peak_memory_stats(self.device)


def _is_taken() -> bool:
    """Whether a profiler runs on this thread. A recording of ours that was lost ends here."""
    owner = profiling.yielding()
    if owner is not None and owner.lost:
        owner.make_way()
    return profiling.is_profiling()
