"""Where a step's updates run: each as soon as nobody needs the old content any more.

An update of ``p`` may run once its new content is there, and no op behind it reads ``p``. Ops of
forward may be run again: what demands one is a backward op that reads its output, or the output of
an op that is run again for it. So behind the last backward op that reads any value made from ``p``,
by ops that may be run again, nobody reads ``p``.

What was traced behind the last backward (the optimizer's ops) may come earlier, which frees
gradients sooner: ops that share values move as one, to where the last of their inputs is made and
the inputs they update are free. Whether that lowers the peak depends on what is alive there, so
both orders are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from remat.passes import ops
from remat.passes.lower import Lowered, LoweredOp
from remat.passes.whole_step import StepGraph, Update
from remat.solvers.problem import Op, Problem
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate


def with_updates(lowered: Lowered, step: StepGraph, bandwidth: float) -> Lowered:
    """``lowered`` with the updates in it, in the better of the two orders.

    Args:
        bandwidth: bytes a second, reads plus writes, for what an update costs.
    """
    placing = _Placing(_contents_once(lowered, step), step, bandwidth)
    late = placing.ordered(placing.late())
    groups = placing.groups()
    if not groups:
        return late
    early = placing.ordered(placing.early(groups))
    return min((late, early), key=lambda made: (baseline_peak(made.problem), made is early))


def _contents_once(lowered: Lowered, step: StepGraph) -> Lowered:
    """``lowered`` with every new content made once: made again behind another update, it would be
    made from what that one has written.
    """
    held = {s for update in step.updates for s in lowered.storages.held[update.content]}
    makers = {lowered.problem.producer[lowered.value_of[storage]] for storage in held}
    ops = tuple(
        dataclasses.replace(op, rerunnable=op.rerunnable and index not in makers)
        for index, op in enumerate(lowered.problem.ops)
    )
    return dataclasses.replace(lowered, problem=dataclasses.replace(lowered.problem, ops=ops))


def baseline_peak(problem: Problem) -> int:
    """Bytes of the step with every value kept until its last reader."""
    return simulate(problem, program_order(problem)).peak


def program_order(problem: Problem) -> Schedule:
    """Every op once, in order: what an executor does unasked."""
    return Schedule.from_computes(problem, range(len(problem.ops)))


@dataclass
class _Placing:
    """Orders of ops: an op of the problem by its index, an update by the index behind those."""

    lowered: Lowered
    step: StepGraph
    bandwidth: float
    tail: frozenset[int] = field(init=False)
    needs: dict[int, frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.problem = self.lowered.problem
        self.count = len(self.problem.ops)
        self.updates = dict(enumerate(self.step.updates, self.count))
        self.tail = frozenset(
            index
            for index, what in enumerate(self.lowered.ops)
            if what.node in self.step.tail and self.problem.ops[index].phase == "backward"
        )
        self.needs = {index: self._needs(update) for index, update in self.updates.items()}

    def target(self, update: Update) -> int:
        """The value that is written."""
        (storage,) = self.lowered.storages.created[update.target]
        return self.lowered.value_of[storage]

    def contents(self, update: Update) -> tuple[int, ...]:
        """The values the new content lies in."""
        held = self.lowered.storages.held[update.content]
        return tuple(dict.fromkeys(self.lowered.value_of[storage] for storage in held))

    def _needs(self, update: Update) -> frozenset[int]:
        """The ops that read the old content, and the backward ops that may ask for a reader."""
        problem, target = self.problem, self.target(update)
        found, made = set(problem.forward), set[int]()
        for index, op in enumerate(problem.ops):
            if target in op.reads or not made.isdisjoint(op.reads):
                found.add(index)
                if op.phase != "backward" and op.rerunnable:
                    made.update(op.writes)
        return frozenset(found)

    def ready(self, values: Iterable[int]) -> int:
        """The op behind which all ``values`` are there."""
        producer = self.problem.producer
        return max((producer[v] for v in values), default=-1)

    def late(self) -> list[int]:
        """Program order, each update as early in it as can be."""
        return self._with_updates(list(range(self.count)))

    def _with_updates(self, order: list[int]) -> list[int]:
        """Each update goes behind all it waits for; those that wait for the same in their order."""
        at = {index: position for position, index in enumerate(order)}
        due: dict[int, list[int]] = {}
        for index, update in self.updates.items():
            waits = [at.get(self.ready(self.contents(update)), -1)]
            waits += [at[need] for need in self.needs[index]]
            due.setdefault(max(waits), []).append(index)
        placed = list(due.get(-1, []))
        for position, index in enumerate(order):
            placed.append(index)
            placed += due.get(position, [])
        return placed

    def groups(self) -> list[list[int]]:
        """Ops of the tail that share values made in it; none where one of them may not move."""
        moving = [self.lowered.ops[index].node for index in sorted(self.tail)]
        if any(node is None or ops.is_random(node) or ops.has_effect(node) for node in moving):
            return []
        leader = {index: index for index in self.tail}

        def find(index: int) -> int:
            while leader[index] != index:
                leader[index] = leader[leader[index]]
                index = leader[index]
            return index

        for index in sorted(self.tail):
            for value in self.problem.ops[index].reads:
                producer = self.problem.producer[value]
                if producer in leader:
                    leader[find(index)] = find(producer)
        for update in self.updates.values():
            self._join(update, leader, find)
        found: dict[int, list[int]] = {}
        for index in sorted(self.tail):
            found.setdefault(find(index), []).append(index)
        return list(found.values())

    def _join(self, update: Update, leader: dict[int, int], find: object) -> None:
        """Who makes the new content, and who else of the tail reads the old, move together."""
        assert callable(find)
        target = self.target(update)
        together = [i for i in self.tail if target in self.problem.ops[i].reads]
        made = [self.problem.producer[v] for v in self.contents(update)]
        together += [index for index in made if index in leader]
        for index in together[1:]:
            leader[find(index)] = find(together[0])

    def early(self, groups: Sequence[list[int]]) -> list[int]:
        """Each group behind the last op of forward and backward that it waits for."""
        due: dict[int, list[int]] = {}
        for group in groups:
            due.setdefault(self._group_ready(group), []).extend(group)
        order: list[int] = []
        rest = [index for index in range(self.count) if index not in self.tail]
        last_forward = max(self.problem.forward, default=-1)
        for index in rest:
            order.append(index)
            if index == last_forward:
                order += [i for at in sorted(due) if at <= index for i in sorted(due[at])]
            elif index > last_forward:
                order += sorted(due.get(index, []))
        return self._with_updates(order)

    def _group_ready(self, group: Sequence[int]) -> int:
        members = set(group)
        reads = {v for i in group for v in self.problem.ops[i].reads}
        made = {v for i in group for v in self.problem.ops[i].writes}
        waits = [self.problem.producer[v] for v in reads - made]
        for index, update in self.updates.items():
            if members & {self.problem.producer[v] for v in self.contents(update)}:
                waits += self.needs[index] - self.tail
        return max([i for i in waits if i not in members], default=-1)

    def ordered(self, order: Sequence[int]) -> Lowered:
        """The problem with its ops, and the updates, in this order."""
        whats = [
            self.lowered.ops[i] if i < self.count else self._what(self.updates[i]) for i in order
        ]
        rows = [
            self.problem.ops[i] if i < self.count else self._row(self.updates[i]) for i in order
        ]
        problem = dataclasses.replace(self.problem, ops=tuple(rows))
        return dataclasses.replace(self.lowered, problem=problem, ops=tuple(whats))

    def _what(self, update: Update) -> LoweredOp:
        return LoweredOp("update", update.target)

    def _row(self, update: Update) -> Op:
        target = self.target(update)
        moved = 2 * self.problem.values[target].bytes
        return Op(
            name=f"{update.target.name}.update",
            phase="backward",
            reads=tuple(v for v in self.contents(update) if v != target),
            writes=(),
            seconds=moved / self.bandwidth,
            target="update",
            rerunnable=False,
        )
