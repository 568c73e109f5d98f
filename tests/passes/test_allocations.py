"""The watch on the allocator: exact to the byte, and equal to torch's newer profiler."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from remat.passes.allocations import Allocations
from remat.solvers.errors import RematError


def test_peak_and_final_are_bytes_asked_for() -> None:
    with Allocations() as watch:
        a = torch.empty(1001, dtype=torch.uint8)  # an odd size: nothing is rounded on the CPU
        b = torch.empty(250)
        del a
        c = torch.empty(3)
    assert (watch.peak, watch.final) == (2001, 1012)
    assert [level for _, level in watch.timeline] == [1001, 2001, 1000, 1012]
    assert watch.reserved is None
    del b, c


def test_freeing_what_was_there_before_counts_negative() -> None:
    with Allocations():
        old = torch.empty(100)
    with Allocations() as watch:
        del old
        new = torch.empty(25)
    assert (watch.peak, watch.final) == (0, -300)
    del new


def test_an_empty_block_is_zero() -> None:
    with Allocations() as watch:
        pass
    assert (watch.peak, watch.final, watch.timeline) == (0, 0, ())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4096)), max_size=30))
def test_levels_follow_any_sequence_of_allocations(moves: list[tuple[bool, int]]) -> None:
    held: list[torch.Tensor] = []
    level, levels = 0, []
    with Allocations() as watch:
        for allocate, size in moves:
            if allocate or not held:
                held.append(torch.empty(size, dtype=torch.uint8))
                level += size
            else:
                level -= held[0].nbytes
                del held[0]
            levels.append(level)
    assert [seen for _, seen in watch.timeline] == levels
    assert watch.peak == max(levels, default=0)
    assert watch.final == level


def _train() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    kernel = torch.randn(8, 1, 3, 3, requires_grad=True)
    image = torch.randn(4, 1, 64, 64)
    mixed = torch.nn.functional.conv2d(image @ weight, kernel).relu().softmax(-1)
    mixed.sum().backward()


def test_events_equal_those_of_the_newer_profiler() -> None:
    _train()
    with Allocations() as watch:
        _train()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as kineto:
        _train()
    found = kineto.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
    level, levels = 0, []
    for _, size in events:
        level += size
        levels.append(level)
    assert [seen for _, seen in watch.timeline] == levels
    assert watch.peak > 0


def test_a_profiler_on_this_thread_is_refused_and_left_running() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        with pytest.raises(RematError, match="a torch profiler is already running on this thread"):
            Allocations().__enter__()
        torch.empty(7)
    assert any(event.key == "aten::empty" for event in running.key_averages())


def test_another_thread_can_be_watched_while_a_profiler_runs_here() -> None:
    peaks: list[int] = []

    def work() -> None:
        with Allocations() as watch:
            torch.empty(100)
        peaks.append(watch.peak)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert peaks == [400]


def test_the_watch_ends_when_the_block_raises() -> None:
    watch = Allocations()

    def fail() -> None:
        with watch:
            torch.empty(10)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert watch.peak == 40
    with Allocations() as again:
        pass
    assert again.peak == 0


def test_an_unwatchable_device_is_named() -> None:
    with pytest.raises(RematError, match="device 'meta': only cpu and cuda"):
        Allocations("meta")


@pytest.mark.cuda
def test_cuda_counts_blocks_of_512_bytes() -> None:
    torch.empty(1, device="cuda")
    with Allocations("cuda") as watch:
        a = torch.empty(1, device="cuda")
        b = torch.empty(129, device="cuda")
        del b
    assert (watch.peak, watch.final) == (1536, 512)
    assert watch.reserved is not None
    assert watch.reserved >= 1536
    del a
