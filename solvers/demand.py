"""Lazy demand: what has to run, and in which order, before an op can."""

from __future__ import annotations

from collections.abc import Container, Iterable

from remat.solvers.problem import Problem


def missing_ops(problem: Problem, present: Container[int], wanted: Iterable[int]) -> list[int]:
    """The ops to run so that every value of ``wanted`` is there, depth first, in that order.

    Args:
        present: values that are there; owned values and unwritten ones count as there anyway.
        wanted: values, say what an op reads: what the first of them needs runs first.

    No recursion: chains are long.
    """
    order: dict[int, None] = {}
    made: set[int] = set()

    def absent(values: Iterable[int]) -> list[tuple[int, bool]]:
        return [
            (problem.producer[v], False)
            for v in values
            if problem.producer[v] >= 0 and v not in present and v not in made
        ]

    stack = absent(wanted)[::-1]
    while stack:
        index, ready = stack.pop()
        if index in order:
            continue
        if ready:
            order[index] = None
            made.update(problem.ops[index].writes)
            continue
        stack.append((index, True))
        stack += absent(problem.ops[index].reads)[::-1]
    return list(order)


def always_kept(problem: Problem) -> list[bool]:
    """For each value, whether no plan may drop it: outputs, owned, made by an op that runs once.

    Whether values of no bytes are dropped makes no difference to any peak; who wants them kept says
    so.
    """
    return [
        value.owned
        or value.output is not None
        or (problem.producer[v] >= 0 and not problem.ops[problem.producer[v]].rerunnable)
        for v, value in enumerate(problem.values)
    ]
