"""A file on disk that values are offloaded to: one thread writes, another one reads.

The file has no name: where the system can do so it never had one, else it is removed as soon as it
is open. So nothing is left behind, however the process ends: the system takes the space back with
the last file descriptor. On NFS the removed file stays under the name ``.nfs…`` until it is closed;
a file system on which an open file cannot be removed is refused when the options are checked.

Nothing is synchronised to the disk, for no other process ever reads it. Bytes go straight from and
to the memory of tensors; what the system caches of the file is not the allocator's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import torch

from remat.solvers.errors import InvalidOption, RematError
from remat.solvers.units import format_bytes

_PAGE: Final = 4096
_THREADS: Final = "remat-"
_MOST: Final = 2**30
"""Bytes of one system call; Linux takes no more than 2 GiB."""


class Queue(Protocol):
    """Runs functions one after the other."""

    def submit(self, function: Callable[..., None], /, *args: Any) -> Future[None]:
        """Add one to its end."""


def new_queue(name: str) -> Queue:
    """A thread of its own, started at the first job and gone with the queue."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"{_THREADS}{name}")


@dataclass(frozen=True, slots=True)
class Room:
    """A part of the file; ``bytes`` are whole pages."""

    offset: int
    bytes: int


class DiskFile:
    """A file without a name, and which parts of it are free.

    Raises:
        RematError: no file can be made in ``directory``.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            self._fail("making the file", error)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.end = 0
        self._lock = threading.Lock()
        # Rooms come back in finalizers, which may interrupt anything: what they do here is one
        # operation that the interpreter does not divide.
        self._free: dict[int, list[int]] = {}

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have the system set aside rooms of these sizes.

        Raises:
            RematError: there is not enough space.
        """
        wanted = Counter(_pages(size) for size in sizes)
        missing = {pages: n - len(self._free.get(pages, ())) for pages, n in wanted.items()}
        rooms = [self._extend(pages) for pages, n in missing.items() for _ in range(n)]
        if rooms:
            total = sum(room.bytes for room in rooms)
            try:
                _set_aside(self.descriptor, self.directory, rooms[0].offset, total)
            except OSError as error:
                self._fail(f"setting {format_bytes(total)} aside", error)
        for room in rooms:
            self.give(room)

    def take(self, size: int) -> Room:
        """A free room, else a new one at the end of the file."""
        pages = _pages(size)
        try:
            return Room(self._free[pages].pop(), pages)
        except (KeyError, IndexError):
            return self._extend(size)

    def give(self, room: Room) -> None:
        """The room is free."""
        self._free.setdefault(room.bytes, []).append(room.offset)

    def write(self, room: Room, address: int, size: int) -> None:
        """Copy ``size`` bytes of memory into the room.

        Raises:
            RematError: the system's error, and what to do.
        """
        memory, done = _memory(address, size), 0
        while done < size:
            try:
                done += os.pwrite(self.descriptor, memory[done : done + _MOST], room.offset + done)
            except OSError as error:
                self._fail(f"writing {format_bytes(size)}", error)

    def read(self, room: Room, address: int, size: int) -> None:
        """Fill ``size`` bytes of memory from the room.

        Raises:
            RematError: the system's error, and what to do.
        """
        memory, done = _memory(address, size), 0
        while done < size:
            try:
                count = os.preadv(
                    self.descriptor, [memory[done : done + _MOST]], room.offset + done
                )
                if count == 0:
                    raise OSError(f"the file ends {size - done} bytes too early")
            except OSError as error:
                self._fail(f"reading {format_bytes(size)}", error)
            done += count

    def _extend(self, size: int) -> Room:
        with self._lock:
            room = Room(self.end, _pages(size))
            self.end += room.bytes
        return room

    def _fail(self, what: str, error: OSError) -> NoReturn:
        raise RematError(
            f"offloading to {self.directory}: {what} failed: {error}. "
            f"{_advice(self.directory)} No gradient was computed from what is missing"
        ) from error


def _set_aside(descriptor: int, directory: str, first: int, size: int) -> None:
    """Have the file system give the bytes to the file, or see that it could."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, first, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        else:
            return
    space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _advice(directory: str) -> str:
    try:
        space = os.statvfs(directory)
    except OSError:
        return "Give another directory as offload=."
    free = format_bytes(space.f_bavail * space.f_frsize)
    return f"{free} are free there: make room, or give another directory as offload=."


def _memory(address: int, size: int) -> memoryview:
    """``size`` bytes from ``address`` on, not copied."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def abandon(future: Future[None], memory: torch.Tensor | None) -> None:
    """Return when the copy no longer touches ``memory``, or see that it is held until then.

    Garbage is collected in any thread, so whoever calls this may be inside the very copy it would
    wait for: then the memory is the copy's until it ends.
    """
    if future.cancel():
        return
    if threading.current_thread().name.startswith(_THREADS):
        future.add_done_callback(lambda _: memory)
    else:
        future.exception()


@dataclass
class _Flight:
    """A copy in a queue.

    The queue works on addresses only: were it to hold the tensor, the last reference might die in
    its thread, where whoever watches the allocator does not see it.
    """

    future: Future[None]
    memory: torch.Tensor | None

    def finish(self) -> None:
        error = self.future.exception()  # interrupted here, it still holds the memory
        self.memory = None
        if error is not None:
            # Another one each time: the traceback of what is raised holds what the step saved,
            # and that must not be held by what it saved.
            raise RematError(str(error)) from error

    def abandon(self) -> None:
        abandon(self.future, self.memory)
        self.memory = None


class Disk:
    """The tier of tensors on the CPU.

    Args:
        directory: where its file is made.
        queues: make the queue of writes and the queue of reads.
    """

    def __init__(self, directory: str, queues: Callable[[str], Queue] = new_queue) -> None:
        self.file = DiskFile(directory)
        self._writes, self._reads = queues("offload"), queues("reload")

    def reserve(self, sizes: Iterable[int]) -> None:
        """See ``transfers.Tier``."""
        self.file.reserve(sizes)

    def take(self, size: int) -> Room:
        """See ``transfers.Tier``."""
        return self.file.take(size)

    def give(self, room: Room) -> None:
        """See ``transfers.Tier``."""
        self.file.give(room)

    def write(self, room: Room, memory: torch.Tensor) -> _Flight:
        """See ``transfers.Tier``."""
        job = self.file.write, room, memory.data_ptr(), memory.numel()
        return _Flight(self._writes.submit(*job), memory)

    def read(self, room: Room, memory: torch.Tensor) -> _Flight:
        """See ``transfers.Tier``."""
        job = self.file.read, room, memory.data_ptr(), memory.numel()
        return _Flight(self._reads.submit(*job), memory)


def check_directory(directory: str) -> None:
    """Make sure that values can be offloaded to ``directory``.

    Raises:
        InvalidOption: it is not there, no file can be made in it, or the system lacks what it
            takes.
    """
    if not hasattr(os, "preadv"):
        raise InvalidOption(
            f"offload={directory!r}: this system cannot read a file at a place (preadv), which "
            "offloading to disk needs; leave offload out"
        )
    if not Path(directory).is_dir():
        what = "is no directory" if Path(directory).exists() else "is not there"
        raise InvalidOption(f"offload={directory!r} {what}; give a directory that exists")
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(_PAGE))
    except OSError as error:
        raise InvalidOption(
            f"offload={directory!r}: no file can be written there ({error}); give a directory "
            "that can be written and has room"
        ) from error
