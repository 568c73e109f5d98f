"""The allocator's events, and nothing else of torch's profiler.

torch reports each allocation and each free of the CPU allocator to the profiler of the thread that
makes it. Of its two profilers the older one is used: its events come in the order they happened
(kineto's must be sorted by time), starting it costs microseconds (kineto: two seconds the first
time), it writes nothing to stderr, and it is bound to one thread, so that a thread of ours can
watch while the user's own profiler runs on the thread that compiles. Both report the same bytes;
a test holds them equal.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
    _profiler_type,
)
from torch._C._profiler import (
    ActiveProfilerType,
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
)
from torch.autograd.profiler import record_function

from remat.solvers.errors import RematError

_MARK: Final = "remat."
_THREAD: Final = threading.local()  # owner: whose recording runs on the thread, if it gives way


class MemoryEvent(NamedTuple):
    """One allocation (``bytes`` > 0) or free (``bytes`` < 0) at ``seconds`` on the clock of
    the profiler, whose zero means nothing."""

    seconds: float
    bytes: int


class Mark(NamedTuple):
    """A call of :func:`mark`, among the events."""

    seconds: float
    name: str


def mark(name: str) -> None:
    """Leave a mark in the recording of the current thread; nothing where none runs."""
    with record_function(_MARK + name):
        pass


def is_profiling() -> bool:
    """A profiler, ours or another, watches the current thread."""
    _end_remnant()
    return bool(_profiler_enabled())


def _end_remnant() -> None:
    """End a recording of ours that was ended inside a backward, where the engine restores it."""
    in_backward = torch._C._current_graph_task_id() != -1
    if getattr(_THREAD, "running", False) or in_backward or not _profiler_enabled():
        return
    if _profiler_type() == ActiveProfilerType.LEGACY:
        with warnings.catch_warnings():
            # Its callback went when it was ended for the first time.
            warnings.filterwarnings("ignore", "Leaked callback handle")
            _disable_profiler_legacy()


class Yielding(Protocol):
    """A recording that lasts from call to call, and gives way to whoever else wants to watch."""

    lost: bool

    def make_way(self) -> None:
        """End it, on the thread it runs on."""


def yielding() -> Yielding | None:
    """The recording that runs on the current thread, if it gives way."""
    owner: Yielding | None = getattr(_THREAD, "owner", None)
    return owner


def start_memory_events(owner: Yielding | None = None) -> None:
    """Begin to record what the current thread allocates and frees on the CPU.

    Threads of autograd and of ``at::parallel_for`` that work for this thread are included.

    Args:
        owner: gives way to whoever else wants to watch this thread; None: nobody does.
    """
    _THREAD.owner, _THREAD.running = owner, True
    shapes, memory, stack, flops, modules = False, True, False, False, False
    _enable_profiler_legacy(
        ProfilerConfig(
            ProfilerState.CPU, shapes, memory, stack, flops, modules, _ExperimentalConfig()
        )
    )


def stop_memory_events() -> list[MemoryEvent]:
    """End the recording; its events in the order they happened."""
    recorded = stop_events()
    if recorded is None:
        raise RematError(
            "another profiler ended the recording of memory events: start and end yours outside of "
            "what remat measures"
        )
    return [event for event in recorded if isinstance(event, MemoryEvent)]


def stop_events() -> list[MemoryEvent | Mark] | None:
    """End the recording of the current thread; its events and marks in the order they happened.

    None, where somebody else's profiler has ended it.
    """
    recording = _profiler_enabled() and _profiler_type() == ActiveProfilerType.LEGACY
    _THREAD.owner, _THREAD.running = None, False
    if not recording:
        return None
    recorded: Any = _disable_profiler_legacy()  # torch's stub describes the other profiler's events
    threads = [
        [read for event in thread if (read := _read(event)) is not None] for thread in recorded
    ]
    if len(threads) == 1:
        return threads[0]
    # Stable: within a thread the order is exact, even where two events share a microsecond.
    return sorted((event for thread in threads for event in thread), key=lambda e: e.seconds)


def _read(event: Any) -> MemoryEvent | Mark | None:
    kind = event.kind()
    if kind == "memory_alloc":
        return MemoryEvent(event.start_us() / 1e6, event.cpu_memory_usage())
    if kind == "push" and event.name().startswith(_MARK):
        return Mark(event.start_us() / 1e6, event.name().removeprefix(_MARK))
    return None
