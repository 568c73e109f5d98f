"""The caching allocator on paper: its rules, and what a schedule's pool takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.executors.cudagraph_pool import Pool, captured_peak, pool_peak
from remat.solvers.simulate import simulate
from tests.remat.conftest import BASELINE, PROBLEM, RECOMPUTES_A

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "segments"),
    [
        (512, [2]), (MIB, [2, 2]), (MIB + 512, [20]), (10 * MIB - 512, [20, 20]),
        (10 * MIB + 512, [12, 12, 12]), (100 * MIB, [100, 100, 100]),
    ],
)  # fmt: skip
def test_three_blocks_of_a_size(size: int, segments: list[int]) -> None:
    """The cases in which torch's own test of graph memory looks at the allocator's counters."""
    pool = Pool()
    for _ in range(3):
        pool.allocate(size)
    assert pool.reserved == sum(segments) * MIB
    # What is too small to be split off counts as allocated, there too.
    assert 3 * size <= pool.allocated < 3 * size + MIB


def test_sizes_are_rounded_to_512_bytes() -> None:
    pool = Pool()
    pool.allocate(1)
    pool.allocate(513)
    assert pool.allocated == 512 + 1024


def test_a_freed_block_is_taken_again_and_neighbours_are_merged() -> None:
    pool = Pool()
    first, second, third = (pool.allocate(4 * MIB) for _ in range(3))
    assert pool.reserved == 20 * MIB
    pool.release(second)
    assert pool.allocate(4 * MIB) == second
    pool.release(first)
    pool.release(second)
    assert pool.allocate(8 * MIB) == first
    pool.release(third)
    assert (pool.allocated, pool.reserved, pool.peak) == (8 * MIB, 20 * MIB, 12 * MIB)


def test_a_large_block_is_not_split_for_a_rest_of_a_mebibyte() -> None:
    pool = Pool()
    pool.allocate(19 * MIB + 512 * 2048)  # rounded up to a segment of its own
    assert pool.allocated == pool.reserved == 20 * MIB


def test_small_and_large_blocks_do_not_mix() -> None:
    pool = Pool()
    large = pool.allocate(5 * MIB)
    pool.release(large)
    pool.allocate(1000)
    assert pool.reserved == 22 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 24 * MIB)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    pool, held = Pool(), dict[int, int]()
    for release, size in steps:
        if release and held:
            pool.release(next(iter(held)))
            del held[next(iter(held))]
        else:
            held[pool.allocate(size)] = size
        spans = sorted((at, at + size) for at, size in held.items())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert sum(held.values()) <= pool.allocated <= pool.peak <= pool.reserved
    for at in list(held):
        pool.release(at)
    assert pool.allocated == 0
    assert all(block.free for block in pool._blocks.values())


def test_the_pool_of_a_schedule() -> None:
    for schedule in (BASELINE, RECOMPUTES_A):
        found = pool_peak(PROBLEM, schedule)
        assert found.reserved == 2 * MIB  # all small
        assert 0 < found.allocated < 8 * 512
        assert captured_peak(PROBLEM, schedule, static=100) == 1000 + 100 + 4 + 2 * MIB
        assert captured_peak(PROBLEM, schedule) >= simulate(PROBLEM, schedule).peak
