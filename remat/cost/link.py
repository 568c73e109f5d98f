"""Where values can be offloaded to, and how fast: probed once for a place, and remembered.

A disk is timed as a long run finds it: what is written counts once it is on the disk, and what is
read comes from there. The system's cache of a file makes short runs faster than that, but what it
takes is memory of the same machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from remat.cost.device import DeviceSpec
from remat.cost.isolation import outside_modes
from remat.cost.store import Store, environment
from remat.options import Options
from remat.passes.disk import DiskFile, new_queue
from remat.passes.tiers import HOST
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Link

_COPIED_BYTES: Final = 2**26
_SMALL_BYTES: Final = 4096
_REPEATS: Final = 3
_LONG_SECONDS: Final = 1.0
# PCIe with 16 lanes reaches about four fifths of what its generation is said to carry.
_PCIE: Final[Mapping[int, Link]] = MappingProxyType(
    {4: Link(25e9, 25e9, 20e-6), 5: Link(50e9, 50e9, 20e-6)}
)
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_FIFTH_GENERATION: Final = ("h100-sxm", "h100-pcie", "h200", "mi300x")


@dataclass(frozen=True)
class Offloading:
    """Where to, and how fast.

    Attributes:
        where: ``"host"`` or a directory.
    """

    where: str
    link: Link

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan should say of the place: a file system in memory frees none of a CPU's."""
        kind = None if self.where == HOST else file_system(self.where)
        if kind not in _IN_MEMORY:
            return ()
        return (
            f"{self.where} is on a {kind}: what is offloaded there still takes this machine's "
            "memory; give a directory on a disk",
        )


def file_system(directory: str, mounts: str = "/proc/self/mounts") -> str | None:
    """The kind of file system a directory is on, as Linux calls it; None where nobody says.

    Args:
        mounts: the file that lists what is mounted.
    """
    real = os.path.realpath(directory)
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return None
    found = [
        (len(place), number, kind)
        for number, (_, place, kind, *_) in enumerate(rows)
        if os.path.commonpath((real, _unescaped(place))) == _unescaped(place)
    ]
    return max(found)[2] if found else None


def _unescaped(place: str) -> str:
    """Blanks and backslashes are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place)


def offloading(options: Options, spec: DeviceSpec) -> Offloading | None:
    """What ``options`` say about offloading from a device; None: nothing may leave it.

    A stored plan brings its link, and its place if none is given.

    Raises:
        InvalidOption: values of this device cannot be offloaded there.
    """
    plan = options.plan
    if plan is not None:
        where = options.offload or plan.offload
        return None if plan.link is None or not where else Offloading(str(where), plan.link)
    if options.offload is False:
        return None
    return Offloading(options.offload, find_link(options.offload, spec))


def find_link(where: str, spec: DeviceSpec) -> Link:
    """How fast values of a device go to a place and come back.

    Args:
        where: ``"host"`` or a directory, which is timed for a second the first time.
        spec: a device; of one that is only described, copies to host memory are assumed to be as
            fast as its PCIe generation.

    Raises:
        InvalidOption: ``"host"`` for a CPU, whose tensors are there already.
    """
    on_cpu = spec.torch_device is not None and spec.torch_device.startswith("cpu")
    if where == HOST and on_cpu:
        raise InvalidOption(
            'offload="host" on a CPU: its tensors are in host memory already. Give a directory '
            'on a disk, as in offload="/scratch", or leave offload out'
        )
    if where == HOST:
        return _host_link(spec)
    disk = _remembered(f"disk {os.path.realpath(where)}", "cpu", lambda: _time_disk(where))
    return disk if on_cpu else _slower(disk, _host_link(spec))


def _host_link(spec: DeviceSpec) -> Link:
    if spec.torch_device is None:
        return _PCIE[5 if spec.name in _FIFTH_GENERATION else 4]
    device = torch.device(spec.torch_device)
    return _remembered("host", spec.torch_device, lambda: _time_host(device))


def _slower(one: Link, other: Link) -> Link:
    """Copies that go through both."""
    return Link(
        min(one.offload_bandwidth, other.offload_bandwidth),
        min(one.reload_bandwidth, other.reload_bandwidth),
        one.latency + other.latency,
    )


def _remembered(name: str, device: str, measure: Callable[[], Link]) -> Link:
    there = torch.device(device)
    store = Store("link", environment(there))
    if name not in store:
        made = outside_modes(measure, there)
        store.put(name, [made.offload_bandwidth, made.reload_bandwidth, made.latency])
        store.save()
    return Link(*store[name])


def _time_disk(directory: str) -> Link:
    """As a run uses it: through a thread of its own, into a file without a name."""
    file = DiskFile(directory)
    # Bytes that nothing compresses, and that no allocator of torch's has to do with.
    memory = ctypes.create_string_buffer(os.urandom(2**20) * (_COPIED_BYTES >> 20), _COPIED_BYTES)
    file.reserve([_COPIED_BYTES])
    address, room = ctypes.addressof(memory), file.take(_COPIED_BYTES)

    def write() -> None:
        file.write(room, address, _COPIED_BYTES)
        os.fsync(file.descriptor)

    def forget() -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    queue = new_queue("probe")

    def small() -> None:
        queue.submit(file.write, room, address, _SMALL_BYTES).result()

    written = _fastest(write, _REPEATS)
    read = _fastest(lambda: file.read(room, address, _COPIED_BYTES), _REPEATS, before=forget)
    return Link(_COPIED_BYTES / written, _COPIED_BYTES / read, _fastest(small, 20))


def _time_host(device: torch.device) -> Link:
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(target: torch.Tensor, source: torch.Tensor, size: int) -> Callable[[], Any]:
        def run() -> None:
            target[:size].copy_(source[:size], non_blocking=True)
            torch.cuda.synchronize(device)

        return run

    seconds = [_fastest(copy(*way, _COPIED_BYTES), 5) for way in ((here, there), (there, here))]
    latency = _fastest(copy(here, there, _SMALL_BYTES), 20)
    return Link(_COPIED_BYTES / seconds[0], _COPIED_BYTES / seconds[1], latency)


def _fastest(function: Callable[[], Any], repeats: int, before: Any = lambda: None) -> float:
    """Least wall time of ``repeats`` calls in seconds, fewer if they are slow.

    Args:
        before: is called before each.
    """
    best, began = float("inf"), time.perf_counter()
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > _LONG_SECONDS:
            break
    return max(best, 1e-9)
