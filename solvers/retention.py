"""A retention map: what is held where. Any map is a valid plan, by lazy demand.

Backward is cut into groups of consecutive ops. ``kept[group]`` are the values carried into a group:
at its start, what is there and not in the set is dropped. Before an op runs, what it reads and what
is missing is computed, depth first, which drops nothing. Nested checkpointing (Chen et al. 2016,
several levels, Griewank and Walther's Revolve) is the map that carries v into every group from h(v)
on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from remat.solvers.demand import always_kept, missing_ops
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule
from remat.solvers.structure import Structure


def schedule_from_retention(
    problem: Problem,
    kept: Sequence[Collection[int]],
    group_of: Sequence[int] | None = None,
    structure: Structure | None = None,
) -> Schedule:
    """The schedule of a retention map.

    Args:
        kept: for each group, the values carried into it. Outputs, gradients, zero-byte values and
            what may not be computed again are carried whatever the map says.
        group_of: for each backward op, its group, ascending from 0; default all in group 0, which
            makes ``kept[0]`` what forward saves.
    """
    return Schedule.from_computes(
        problem, computes_from_retention(problem, kept, group_of, structure)
    )


def computes_from_retention(
    problem: Problem,
    kept: Sequence[Collection[int]],
    group_of: Sequence[int] | None = None,
    structure: Structure | None = None,
) -> list[int]:
    """The ops of the schedule, in order, before the frees are placed."""
    structure = structure or Structure(problem)
    demand = _Demand(problem, structure)
    for index in problem.forward:
        demand.run(index)
    demand.there.difference_update(problem.dropped)
    group = -1
    for at, index in enumerate(problem.backward):
        entered = group_of[at] if group_of is not None else 0
        for group in range(group + 1, entered + 1):  # noqa: B020
            demand.drop_all_but(set(kept[group]))
        demand.make(structure.reads[index])
        demand.run(index)
    outputs = [
        v for v, value in enumerate(problem.values)
        if value.output and problem.producer[v] >= 0
    ]  # fmt: skip
    demand.make(outputs)
    return demand.computes


def saved_by_default(problem: Problem, structure: Structure | None = None) -> set[int]:
    """The forward values that backward needs if nothing is computed again that may be kept."""
    structure = structure or Structure(problem)
    wanted: set[int] = set()
    for index, op in enumerate(problem.ops):
        if op.phase == "backward" or structure.runs_in_backward(index):
            wanted.update(structure.reads[index])
    return {
        v for v in wanted
        if problem.producer[v] >= 0 and problem.ops[problem.producer[v]].phase == "forward"
    } - set(problem.dropped)  # fmt: skip


class _Demand:
    """Runs ops and makes what is missing."""

    def __init__(self, problem: Problem, structure: Structure) -> None:
        self.problem, self.structure = problem, structure
        self.computes: list[int] = []
        self.there: set[int] = set(problem.tangents)
        again = structure.computed_again
        self.always = {
            v
            for v, kept in enumerate(always_kept(problem))
            if kept or problem.values[v].bytes == 0 or not again[v]
        }

    def run(self, index: int) -> None:
        self.computes.append(index)
        self.there.update(self.problem.ops[index].writes)

    def drop_all_but(self, kept: set[int]) -> None:
        self.there &= kept | self.always

    def make(self, values: Sequence[int]) -> None:
        """Compute what is missing of ``values``."""
        for index in missing_ops(self.problem, self.there, values):
            self.run(index)
