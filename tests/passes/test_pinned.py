"""The order in which pinned copies run beside what computes: every edge, on streams of paper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat.passes import pinned
from remat.passes.pinned import Pinned
from remat.passes.tiers import OwnTiers, tier_for
from remat.solvers.errors import RematError

CPU = torch.device("cpu")


class Event:
    """What had been queued when it was recorded."""

    def __init__(self, before: set[str], recording: int) -> None:
        self.before, self.recording = set(before), recording

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class Stream:
    """What must have run before that which is queued next."""

    def __init__(self, device: object, cuda: Cuda) -> None:
        self.cuda = cuda
        self.before: set[str] = set()

    def queue(self, name: str) -> None:
        self.cuda.ran[name] = set(self.before)
        self.before.add(name)

    def record_event(self) -> Event:
        return Event(self.before, self.cuda.recording)

    def wait_event(self, event: Event) -> None:
        assert event.recording == self.cuda.recording, "an event from outside the recording"
        self.before |= event.before

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Cuda:
    """Stands for ``torch`` in the module: streams of paper, and tensors that say what they do."""

    uint8, device, Tensor = torch.uint8, torch.device, torch.Tensor

    def __init__(self) -> None:
        self.ran: dict[str, set[str]] = {}
        self.recording = 0
        self.main = self.current = Stream(CPU, self)
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(device, self),
            current_stream=lambda device: self.current,
            stream=self._stream,
        )
        self.pinned = 0

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, size: int, **_: Any) -> Memory:
        self.pinned += 1
        return Memory(f"room{self.pinned}", size, self)


class Memory:
    def __init__(self, name: str, size: int, cuda: Cuda) -> None:
        self.name, self.size, self.cuda = name, size, cuda

    def numel(self) -> int:
        return self.size

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.current.queue(f"{source.name}>{self.name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(pinned, "torch", made)
    return made


def there_and_back(cuda: Cuda, tier: Any, name: str) -> None:
    """As an emitted graph does it, with the last reader of the value before the wait."""
    cuda.main.queue(f"make {name}")
    room = tier.take(8)
    out = tier.write(room, Memory(name, 8, cuda))
    cuda.main.queue(f"read {name}")
    out.finish()
    cuda.main.queue(f"reuse {name}")  # its memory is somebody else's
    back = tier.read(room, Memory(f"{name}'", 8, cuda))
    cuda.main.queue(f"beside {name}")
    back.finish()
    cuda.main.queue(f"read {name}'")
    tier.give(room)


def test_every_edge_is_there_and_no_other(cuda: Cuda) -> None:
    tier = Pinned(CPU)
    for name in ("a", "b"):
        there_and_back(cuda, tier, name)
    assert cuda.pinned == 1  # the room was given back
    for name in ("a", "b"):
        out, back = f"{name}>room1", f"room1>{name}'"
        assert f"make {name}" in cuda.ran[out]
        assert f"read {name}" not in cuda.ran[out]
        assert out not in cuda.ran[f"read {name}"]  # beside it
        assert out in cuda.ran[f"reuse {name}"]
        assert {out, f"reuse {name}"} <= cuda.ran[back]  # what was in that memory has been read
        assert back not in cuda.ran[f"beside {name}"]
        assert back in cuda.ran[f"read {name}'"]
    assert "room1>a'" in cuda.ran["b>room1"]


def test_a_room_is_not_written_while_it_is_read(cuda: Cuda) -> None:
    """The first reload was never waited for: its backward broke off."""
    tier = Pinned(CPU)
    room = tier.take(8)
    tier.write(room, Memory("a", 8, cuda)).finish()
    tier.read(room, Memory("a'", 8, cuda))
    tier.give(room)
    tier.write(tier.take(8), Memory("b", 8, cuda))
    assert "room1>a'" in cuda.ran["b>room1"]


def test_recordings_wait_for_nothing_outside_and_leave_nothing_open(cuda: Cuda) -> None:
    tiers = OwnTiers(Pinned)
    with tiers.used():  # the run that warms up
        there_and_back(cuda, tier_for("host", CPU), "warm")
    tiers.join()
    cuda.recording = 1
    for stream in _streams(tiers):
        stream.before.clear()
    cuda.main.before.clear()
    with tiers.used():
        tier = tier_for("host", CPU)
        cuda.main.queue("make a")
        room = tier.take(8)
        flight = tier.write(room, Memory("a", 8, cuda))
    assert "a>room1" in cuda.main.before  # joined
    cuda.recording = 2
    for stream in _streams(tiers):
        stream.before.clear()
    with tiers.used():
        flight.finish()
        tier.read(room, Memory("a'", 8, cuda))
    assert "room1>a'" in cuda.main.before
    assert cuda.pinned == 1


def _streams(tiers: OwnTiers) -> list[Any]:
    tier: Any = tiers.tier("host", CPU)
    return [tier._out, tier._in]


def test_without_the_join_a_recording_would_wait_for_an_event_from_outside(cuda: Cuda) -> None:
    tier = Pinned(CPU)
    room = tier.take(8)
    flight = tier.write(room, Memory("a", 8, cuda))
    cuda.recording = 1
    with pytest.raises(AssertionError, match="from outside"):
        flight.finish()


def test_a_recording_offloads_to_host_memory_only(cuda: Cuda) -> None:
    with OwnTiers(Pinned).used(), pytest.raises(RematError, match="only to host memory"):
        tier_for("/tmp", CPU)
