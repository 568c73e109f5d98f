"""Watching the allocator: how far the bytes in use rise, and where they end."""

from __future__ import annotations

import time
from itertools import accumulate
from types import TracebackType
from typing import Final

import torch

from remat.passes.torch_private import profiling
from remat.solvers.errors import RematError

PROFILER_RUNS: Final = (
    "cannot watch the allocator: a torch profiler is already running on this thread, and torch "
    "lets only one run there; stop it first"
)


def watched_device(device: torch.device | str) -> torch.device:
    """The device, if its allocator can be watched.

    Raises:
        RematError: it is neither cpu nor cuda.
    """
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise RematError(
            f"cannot watch the allocator of device {str(found)!r}: "
            "only cpu and cuda report what they allocate"
        )
    return found


class Allocations:
    """Bytes allocated less bytes freed on one device while the ``with`` block runs.

    Every figure is relative to the moment the block was entered. Memory that existed then and is
    freed inside counts negative, so ``final`` may be negative; ``peak`` never is.

    On the CPU the allocator's own events are summed (of this thread and of the threads that work
    for it): exact to the byte, and the bytes are those that were asked for, unrounded. torch
    keeps the size of a block only if a watch (or a profiler) ran when it was allocated: the
    release of any other block is not seen. Whoever wants such releases counted runs the code that
    allocates under a watch of its own first, as ``remat.measure`` does with its warm-up.

    On CUDA the caching allocator's counters are read, which are rounded to 512 bytes; its peak
    counters are reset on entry, those of the user included.

    Attributes, after the block:
        peak: highest level reached, in bytes, at least 0.
        final: level at the end, in bytes.
        seconds: wall time of the block, the watching included.
        timeline: (seconds since entry, level in bytes) after each event; empty on CUDA.
        reserved: bytes the CUDA allocator held from the driver at most, in total and not relative
            to entry; None on the CPU, which has no such pool.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = watched_device(device)
        self.peak = 0
        self.final = 0
        self.seconds = 0.0
        self.timeline: tuple[tuple[float, int], ...] = ()
        self.reserved: int | None = None
        self._entered = 0.0
        self._level_at_entry = 0

    def __enter__(self) -> Allocations:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._level_at_entry = torch.cuda.memory_allocated(self.device)
        else:
            if (owner := profiling.yielding()) is not None:
                owner.make_way()
            if profiling.is_profiling():
                raise RematError(PROFILER_RUNS)
            profiling.start_memory_events()
        self._entered = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.seconds = time.perf_counter() - self._entered
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._level_at_entry
            self.final = torch.cuda.memory_allocated(self.device) - self._level_at_entry
            self.reserved = torch.cuda.max_memory_reserved(self.device)
            return
        self.seconds = time.perf_counter() - self._entered
        events = profiling.stop_memory_events()
        levels = list(accumulate(event.bytes for event in events))
        # The profiler's clock has another zero than ours; the first event sets it.
        start = events[0].seconds if events else 0.0
        self.timeline = tuple(
            (event.seconds - start, level) for event, level in zip(events, levels, strict=True)
        )
        self.peak = max(0, *levels) if levels else 0
        self.final = levels[-1] if levels else 0
