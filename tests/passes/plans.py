"""Schedules to emit in tests: extreme ones, and random ones."""

from __future__ import annotations

import random

from remat.passes.lower import Lowered
from remat.solvers.demand import missing_ops
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule


def recompute_everything(lowered: Lowered) -> Schedule:
    """Keep only what may not be computed again."""
    return random_schedule(lowered.problem, random.Random(0), keep=0.0, forget=0.5)


def random_schedule(
    problem: Problem, rng: random.Random, *, keep: float, forget: float
) -> Schedule:
    """Forward; then, before each backward op, whatever it lacks, computed depth first.

    Args:
        keep: the share of values carried over from forward.
        forget: how likely a value is dropped after each backward op.
    """
    pinned = {
        v
        for v, value in enumerate(problem.values)
        if value.output or value.owned or value.tangent or not _again(problem, v)
    }
    computes = list(problem.forward)
    made = {v for op in computes for v in problem.ops[op].writes}
    present = {v for v in made if v in pinned or rng.random() < keep}
    for index in problem.backward:
        for runs in (*missing_ops(problem, present, problem.ops[index].reads), index):
            computes.append(runs)
            present.update(problem.ops[runs].writes)
        present = {v for v in present if v in pinned or rng.random() >= forget}
    return Schedule.from_computes(problem, computes)


def _again(problem: Problem, value: int) -> bool:
    producer = problem.producer[value]
    return problem.ops[producer].phase != "backward" and problem.ops[producer].rerunnable
