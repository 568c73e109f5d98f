"""The floor: a peak that no schedule of the class can go under.

While the op at a position of the skeleton runs, everything unavoidable there (``structure.py``),
what it reads, what it writes and its workspace are alive together. Nothing is assumed about what is
recomputed, nor about when a deferred op runs.
"""

from __future__ import annotations

from remat.solvers.problem import Problem
from remat.solvers.structure import Structure


def floor(problem: Problem, structure: Structure | None = None) -> tuple[int, int]:
    """(bytes, op index): no schedule of the class peaks below; the op is where that is set.

    The op is -1 where ``fixed_bytes`` alone sets it.
    """
    structure = structure or Structure(problem)
    best, op = problem.fixed_bytes, -1
    for at, used in enumerate(structure.unavoidable_bytes):
        if used > best:
            best, op = int(used), structure.order[at]
    return best, op
