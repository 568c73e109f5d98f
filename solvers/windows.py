"""Transfers that are fixed, as an ordinary problem: what is left to decide is recomputation alone.

Where transfers are given (:class:`Transfers`), an offloaded value takes its bytes in known windows
only: from its op to the end of its copy, and from the start of each reload to the last reader of
that visit. So the value itself is given no bytes, and each window becomes a value of its own, which
an op without cost ends (and, in backward, another begins) and nothing else reads. The search for
ordinary problems then moves the recomputations around the windows.

It is an approximation where a search moves a reader of an offloaded value to before its window, and
where an op that made one runs again (for another of its outputs): what it then makes has no bytes
here. Plans are scheduled again, with the windows they then have, and judged anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from remat.solvers.problem import Op, Phase, Problem, Value
from remat.solvers.transfers import Transfers

_MARK = -1


@dataclass(frozen=True)
class Windowed:
    """A problem with windows in place of transfers.

    Attributes:
        problem: the ordinary problem.
        computes: the plan it was made from, in its ops.
        original: for each op of it, the op it was, or -1 for one that begins or ends a window.
    """

    problem: Problem
    computes: tuple[int, ...]
    original: tuple[int, ...]

    def restore(self, computes: Iterable[int]) -> tuple[int, ...]:
        """The ops of a plan for ``problem``, in those of the problem it came from."""
        return tuple(self.original[op] for op in computes if self.original[op] != _MARK)


def windowed(transfers: Transfers) -> Windowed:
    """Replace the transfers of a plan by windows."""
    return _Builder(transfers).build()


@dataclass(slots=True)
class _Mark:
    """An op without cost that ends windows or begins some, before the op at ``position``.

    Never both in one op: what begins would count beside what ends.
    """

    position: int
    phase: Phase
    begins: bool
    windows: list[int] = field(default_factory=list)


class _Builder:
    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self.trace = transfers, transfers.trace
        self.old = self.trace.problem
        self.values = list(self.old.values)
        self.leaves_with: dict[int, list[int]] = {}
        self.marks: dict[tuple[int, Phase, bool], _Mark] = {}

    def build(self) -> Windowed:
        self._open_windows()
        marks = sorted(
            self.marks.values(), key=lambda m: (m.position, m.phase == "backward", m.begins)
        )
        count = len(self.old.ops)
        order = self._program_order(marks)
        place = {number: at for at, number in enumerate(order)}
        ops = [
            self._op(number) if number < count else self._mark_op(marks[number - count], number)
            for number in order
        ]
        computes: list[int] = []
        following = 0
        for position in range(len(self.trace.computes) + 1):
            while following < len(marks) and marks[following].position == position:
                computes.append(place[count + following])
                following += 1
            computes += (place[op] for op in self.trace.computes[position : position + 1])
        problem = replace(self.old, values=tuple(self.values), ops=tuple(ops))
        original = tuple(number if number < count else _MARK for number in order)
        return Windowed(problem, tuple(computes), original)

    def _open_windows(self) -> None:
        transfers = self.transfers
        for v in transfers.offloaded:
            window = self._window(f"leaving {v}", v)
            self.leaves_with.setdefault(self.old.producer[v], []).append(window)
            freed = transfers.freed_at[v]
            phase: Phase = "forward" if freed <= self.trace.boundary else "backward"
            self._mark(freed, phase, window)
        for k, visit in enumerate(transfers.visits):
            window = self._window(f"visit {k}", visit.value)
            self._mark(transfers.back_at[k], "backward", window, begins=True)
            self._mark(visit.last + 1, "backward", window)
        for v in transfers.offloaded:
            self.values[v] = replace(self.values[v], bytes=0)

    def _window(self, name: str, of: int) -> int:
        value = self.old.values[of]
        self.values.append(Value(f"{name} of {value.name}", value.bytes))
        return len(self.values) - 1

    def _mark(self, position: int, phase: Phase, window: int, *, begins: bool = False) -> None:
        mark = self.marks.setdefault((position, phase, begins), _Mark(position, phase, begins))
        mark.windows.append(window)

    def _program_order(self, marks: Sequence[_Mark]) -> list[int]:
        """Forward ops, then the others, each followed by its marks; marks count on from the ops."""
        behind: dict[int, list[int]] = {}
        skeleton = {"forward": _MARK, "backward": _MARK}
        following = 0
        for position, index in enumerate((*self.trace.computes, _MARK)):
            while following < len(marks) and marks[following].position == position:
                after = skeleton[marks[following].phase]
                behind.setdefault(after, []).append(len(self.old.ops) + following)
                following += 1
            phase = self.old.ops[index].phase if index != _MARK else "deferred"
            if phase == "backward" or (phase == "forward" and position < self.trace.boundary):
                skeleton[phase] = index
        order: list[int] = []
        for index in self.old.forward:
            order += (index, *behind.get(index, ()))
        order += behind.get(_MARK, ())
        for index, op in enumerate(self.old.ops):
            if op.phase != "forward":
                order += (index, *behind.get(index, ()))
        return order

    def _op(self, index: int) -> Op:
        op = self.old.ops[index]
        touched = {*op.reads, *op.writes}
        least = -sum(self.values[v].bytes for v in touched) if op.phase == "backward" else 0
        leaving = self.leaves_with.get(index, ())
        return replace(op, writes=(*op.writes, *leaving), workspace=max(op.workspace, least))

    @staticmethod
    def _mark_op(mark: _Mark, number: int) -> Op:
        windows = tuple(mark.windows)
        reads, writes = ((), windows) if mark.begins else (windows, ())
        return Op(f"window mark {number}", mark.phase, reads, writes, rerunnable=False)
