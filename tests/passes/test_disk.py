"""Tiers: rooms of a file, what is refused, and single values that go and come back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from remat.passes import offload as _offload  # noqa: F401  it registers the ops
from remat.passes import tiers
from remat.passes.disk import Disk, _Flight, new_queue
from remat.solvers.errors import RematError

CPU = torch.device("cpu")


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("whole", [True, False])
def test_strides_and_offsets_come_back(whole: bool, tmp_path: Path) -> None:
    base = torch.randn(6, 5, 4)
    for value in (base.permute(2, 0, 1), base[1:3].transpose(0, 1), base[..., 2], base[3, 2, 1]):
        token = torch.ops.remat.offload(value, str(tmp_path), whole)
        torch.ops.remat.wait_offload(token, value)
        back = torch.ops.remat.reload(token, value.shape, value.stride(), value.dtype, value.device)
        torch.ops.remat.wait_reload(token, back)
        assert torch.equal(value, back)
        assert back.stride() == value.stride()
        stored = (
            base.numel()
            if whole
            else 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        )
        assert back.untyped_storage().nbytes() == 4 * stored


def test_the_file_is_closed_with_the_last_who_could_use_it(tmp_path: Path) -> None:
    where = str(tmp_path)
    held = tiers.hold(where, CPU, [10_000, 20_000])
    assert tiers.tier_for(where, CPU) is held
    assert isinstance(held, Disk)
    descriptor = held.file.descriptor
    assert Path(f"/proc/self/fd/{descriptor}").exists() or not Path("/proc/self").exists()
    del held
    gc.collect()
    fresh = tiers.tier_for(where, CPU)
    assert isinstance(fresh, Disk)
    assert fresh.file.end == 0


def test_a_disk_without_room_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RematError, match=r"setting 2\.00 MiB aside failed: .*No space left"):
        tiers.hold(str(tmp_path), CPU, [2**20, 2**20])


def test_rooms_are_set_aside_once(tmp_path: Path) -> None:
    where = str(tmp_path)
    held = tiers.hold(where, CPU, [5000, 5000, 100])
    assert isinstance(held, Disk)
    assert held.file.end == 2 * 8192 + 4096
    assert tiers.hold(where, CPU, [5000, 100]) is held
    assert held.file.end == 2 * 8192 + 4096
    tiers.hold(where, CPU, [5000] * 3)
    assert held.file.end == 3 * 8192 + 4096


def test_host_memory_is_no_place_for_what_is_there() -> None:
    with pytest.raises(RematError, match="'host': host memory takes those of cuda"):
        torch.ops.remat.offload(torch.zeros(4), "host", True)


def test_a_copy_nobody_waited_for_is_waited_for_by_its_reload(tmp_path: Path) -> None:
    value = torch.randn(64)
    token = torch.ops.remat.offload(value, str(tmp_path), True)
    back = torch.ops.remat.reload(token, [64], [1], torch.float32, CPU)
    torch.ops.remat.wait_reload(token, back)
    assert torch.equal(value, back)


def test_garbage_may_die_inside_its_own_copy() -> None:
    """Python collects garbage in any thread, that of the copy among them."""
    queue, made = new_queue("test"), Queue()
    memory = torch.zeros(4)
    held = weakref.ref(memory)

    def copy() -> None:
        flight = made.get()
        flight.abandon()
        assert flight.memory is None
        del flight
        assert held() is not None, "the copy still works on it"

    future = queue.submit(copy)
    made.put(_Flight(future, memory))
    del memory
    future.result(timeout=60)
