"""A plan as a memory snapshot, for the viewer at pytorch.org/memory_viz.

The file is what ``torch.cuda.memory._dump_snapshot`` writes: a pickle of plain data, of a protocol
the viewer reads (2 to 4), with ``device_traces`` (what was allocated and released, in order) and
``segments`` (what is there at the end). Addresses are made up: each allocation takes the lowest gap
it fits in, so the one segment is as large as a first-fit allocator would need.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Final

from remat.report.events import Change, Scheduled, changes, slices
from remat.solvers.problem import Problem

PROTOCOL: Final = 4
"""The newest pickle protocol the viewer reads."""

FIRST_ADDRESS: Final = 0x7F00_0000_0000
_SOURCE: Final = re.compile(r"(?P<file>.+):(?P<line>\d+) in (?P<function>\S+)")


def snapshot_bytes(plan: Scheduled) -> bytes:
    """The snapshot as a file; drop it on pytorch.org/memory_viz to see it."""
    return pickle.dumps(memory_snapshot(plan), protocol=PROTOCOL)


def memory_snapshot(plan: Scheduled) -> dict[str, Any]:
    """The snapshot as plain data. The bytes of resident tensors are one allocation."""
    arena, trace = _Arena(FIRST_ADDRESS), []
    places: dict[int, tuple[int, Change]] = {}
    moments = _moments(plan)
    for change in changes(plan.problem, plan.schedule, plan.timeline):
        if change.bytes > 0:
            places[change.block] = arena.take(change.bytes), change
        address, _ = places[change.block]
        event = {
            "addr": address,
            "size": abs(change.bytes),
            "stream": 0,
            "time_us": moments[change.step],
            "frames": _frames(plan.problem, change, moments),
        }
        if change.bytes > 0:
            trace.append({"action": "alloc", **event})
            continue
        trace.append({"action": "free_requested", **event})
        trace.append({"action": "free_completed", **event})
        del places[change.block]
        arena.give_back(address, -change.bytes)
    left = sorted(places.values(), key=lambda place: place[0])
    frames = {address: _frames(plan.problem, change, moments) for address, change in left}
    blocks = [(address, change.bytes) for address, change in left]
    return {"segments": [_segment(arena.end, blocks, frames)], "device_traces": [trace]}


def _moments(plan: Scheduled) -> dict[int, int]:
    """Microseconds since the begin at which each step begins."""
    begins = {s.step: s.begin for s in slices(plan.problem, plan.schedule, plan.link)}
    moments, latest = {-1: 0}, 0
    for step in range(len(plan.schedule.steps) + 1):
        latest = max(latest, round(1e6 * begins.get(step, 0.0)))
        moments[step] = latest
    return moments


def _frames(problem: Problem, change: Change, moments: dict[int, int]) -> list[dict[str, Any]]:
    """What the viewer shows of an allocation: the value, then where it comes from."""
    if change.maker < 0:
        what = "resident" if change.what == "resident" else "from outside the graph"
        return [{"name": change.name, "filename": what, "line": 0}]
    op = problem.ops[change.maker]
    kinds = {"copy": " (second copy)", "workspace": " (workspace)"}
    name = f"{change.name}{kinds.get(change.what, '')} of {op.target or op.name}, {op.phase}"
    found = _SOURCE.fullmatch(op.source)
    frames = [
        {
            "name": name,
            "filename": found["file"] if found else op.source or "(no source line)",
            "line": int(found["line"]) if found else 0,
        }
    ]
    if op.layer:
        frames.append({"name": op.layer, "filename": "module", "line": 0})
    return frames


def _segment(
    end: int, blocks: list[tuple[int, int]], frames: dict[int, list[dict[str, Any]]]
) -> dict[str, Any]:
    """The one segment, tiled with what is alive at the end and the gaps between."""
    active = sum(size for _, size in blocks)
    return {
        "device": 0,
        "address": FIRST_ADDRESS,
        "total_size": end - FIRST_ADDRESS,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(_tiles(end, blocks, frames)),
    }


def _tiles(
    end: int, blocks: list[tuple[int, int]], frames: dict[int, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    at = FIRST_ADDRESS
    for address, size in [*blocks, (end, 0)]:
        if address > at:
            yield _block(at, address - at, "inactive", [])
        if size:
            yield _block(address, size, "active_allocated", frames[address])
        at = address + size


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frames,
    }


class _Arena:
    """Addresses, first fit.

    Attributes:
        end: first address that was never used.
    """

    def __init__(self, first: int) -> None:
        self.end = first
        self._gaps: list[tuple[int, int]] = []  # (address, size), by address, never adjacent

    def take(self, size: int) -> int:
        """The address of a new block."""
        for place, (address, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[place : place + 1] = (
                    [(address + size, room - size)] if room > size else []
                )
                return address
        address, self.end = self.end, self.end + size
        return address

    def give_back(self, address: int, size: int) -> None:
        """The block is free; gaps that touch become one."""
        insort(self._gaps, (address, size))
        place = bisect_left(self._gaps, (address, size))
        for left in (place, place - 1):
            if 0 <= left < len(self._gaps) - 1:
                (first, room), (second, more) = self._gaps[left : left + 2]
                if first + room == second:
                    self._gaps[left : left + 2] = [(first, room + more)]
