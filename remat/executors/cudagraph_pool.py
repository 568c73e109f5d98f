"""How much memory the pool of a recorded graph takes: torch's caching allocator on paper.

While a graph is recorded, allocations and frees go through the allocator as in eager code, in a
pool of their own; a replay allocates nothing. What a captured step takes is therefore what the pool
has reserved when recording ends, not what is alive at the peak. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` with default settings
(``PYTORCH_CUDA_ALLOC_CONF`` unset, no expandable segments):

* sizes are rounded up to 512 bytes;
* up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from a
  segment of their own, rounded up to 2 MiB;
* the smallest free block that is large enough is taken (of equal ones the lowest), and split if
  what remains is at least 512 bytes (small) or more than 1 MiB (large);
* a freed block is merged with its free neighbours. Segments are kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule

_MIB: Final = 1 << 20
_BLOCK: Final = 512
_SMALL: Final = _MIB
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_OWN_SEGMENT: Final = 10 * _MIB
_ROUND_LARGE: Final = 2 * _MIB


@dataclass(frozen=True)
class PoolPeak:
    """What a pool takes.

    Attributes:
        allocated: bytes in blocks when most were.
        reserved: bytes of its segments, at the end and so at the most.
    """

    allocated: int
    reserved: int


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    small: bool
    free: bool = False
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class Pool:
    """A private pool, empty at first.

    Attributes:
        allocated, reserved: bytes in blocks, and in segments, now.
        peak: the most bytes that were in blocks.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak = 0
        self._end = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}

    def allocate(self, size: int) -> int:
        """The address of a block for ``size`` bytes (at least 1)."""
        wanted = max(_BLOCK, -(-size // _BLOCK) * _BLOCK)
        small = wanted <= _SMALL
        block = self._take(wanted, small) or self._segment(wanted, small)
        rest = block.size - wanted
        if rest >= _BLOCK if small else rest > _SMALL:
            self._split(block, wanted)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block.address

    def release(self, address: int) -> None:
        """Give a block back."""
        block = self._blocks[address]
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            self._forget(block.before)
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            self._forget(block.after)
            block = self._merge(block, block.after)
        block.free = True
        insort(self._free[block.small], block.key)

    def _take(self, wanted: int, small: bool) -> _Block | None:
        free = self._free[small]
        position = bisect_left(free, (wanted, -1))
        return self._blocks[free.pop(position)[1]] if position < len(free) else None

    def _segment(self, wanted: int, small: bool) -> _Block:
        size = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        if wanted >= _OWN_SEGMENT:
            size = -(-wanted // _ROUND_LARGE) * _ROUND_LARGE
        # With a gap behind all others: segments are never merged.
        block = _Block(self._end, size, small)
        self._end += size + _BLOCK
        self._blocks[block.address] = block
        self.reserved += size
        return block

    def _split(self, block: _Block, wanted: int) -> None:
        rest = _Block(block.address + wanted, block.size - wanted, block.small, True, block)
        rest.after, block.after = block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        block.size = wanted
        self._blocks[rest.address] = rest
        insort(self._free[block.small], rest.key)

    def _forget(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, block.key))

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        del self._blocks[second.address]
        return first


def pool_peak(problem: Problem, schedule: Schedule) -> PoolPeak:
    """What the pool takes in which the ops of ``schedule`` are recorded.

    Owned values, and gradients that arrive, lie outside of it. An op's workspace is one block,
    released when the op returns; a second instance of a value that is alive, likewise.
    """
    pool = Pool()
    held: dict[int, int] = {}
    for step in schedule.steps:
        if step.kind == "free" and step.index in held:
            pool.release(held.pop(step.index))
        if step.kind == "reload" and problem.values[step.index].bytes:
            held[step.index] = pool.allocate(problem.values[step.index].bytes)
        if step.kind != "compute":
            continue
        op = problem.ops[step.index]
        passing = [op.workspace] if op.workspace > 0 else []
        for value in op.writes:
            size = problem.values[value].bytes
            if value in held:
                passing.append(size)
            elif size:
                held[value] = pool.allocate(size)
        for address in [pool.allocate(size) for size in passing if size]:
            pool.release(address)
    return PoolPeak(pool.peak, pool.reserved)


def captured_peak(problem: Problem, schedule: Schedule, *, static: int = 0) -> int:
    """The peak of a recorded step: what is resident, static copies, and the whole pool.

    Args:
        static: bytes of inputs that are copied to fixed addresses, and of outputs that are copied
            out of the pool.
    """
    tangents = sum(problem.values[v].bytes for v in problem.tangents)
    return problem.fixed_bytes + static + tangents + pool_peak(problem, schedule).reserved
