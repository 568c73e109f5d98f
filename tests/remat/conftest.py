"""One training step small enough to work out by hand, and a plan for it.

Two blocks and a loss; 1000 bytes are resident. The plan computes the first block's output again::

    step     f_a   f_b   f_loss  b_loss  (f_a)  b_b   b_a
    baseline 1100  1300  1304    1508           1404  1114
    plan     1100  1300  1204    1408    1304   1404  1114
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from remat.plans import Plan
from remat.solvers.problem import Op, Problem, Value
from remat.solvers.schedule import Schedule, Solution
from remat.solvers.simulate import simulate

if TYPE_CHECKING:
    from remat.step_plan import StepPlan

PROBLEM = Problem(
    name="two blocks",
    fixed_bytes=1000,
    values=(
        Value("x", 10, owned=True),
        Value("a", 100),
        Value("b", 200),
        Value("loss", 4, output="forward"),
        Value("t", 4, tangent=True),
        Value("grad_b", 200),
        Value("grad_a", 100),
        Value("grad_x", 10, output="backward"),
    ),
    ops=(
        Op("f_a", "forward", (0,), (1,), 1.0, 10, target="mm", layer="blocks.0", source="m.py:10"),
        Op("f_b", "forward", (1,), (2,), 2.0, 20, target="mm", layer="blocks.1", source="m.py:11"),
        Op("f_loss", "forward", (2,), (3,), 0.5, 1, target="sum", source="m.py:12"),
        Op("b_loss", "backward", (4, 2), (5,), 0.5, 1, target="expand", source="m.py:12"),
        Op("b_b", "backward", (5, 1), (6,), 4.0, 40, target="mm", layer="blocks.1"),
        Op("b_a", "backward", (6, 0), (7,), 2.0, 20, target="mm", layer="blocks.0"),
    ),
)
BASELINE = Schedule.from_computes(PROBLEM, (0, 1, 2, 3, 4, 5))
RECOMPUTES_A = Schedule.from_computes(PROBLEM, (0, 1, 2, 3, 0, 4, 5))


@pytest.fixture
def problem() -> Problem:
    return PROBLEM


@pytest.fixture
def solution() -> Solution:
    return Solution(
        problem_key=PROBLEM.key,
        schedule=RECOMPUTES_A,
        timeline=simulate(PROBLEM, RECOMPUTES_A),
        memory_budget=1450,
        status="feasible",
        lower_bound=10.45,
        peak_lower_bound=1404,
        floor_op=4,
        solver="ilp",
        solve_time=0.25,
        failures=("anneal: timed out",),
    )


@pytest.fixture
def plan(solution: Solution) -> Plan:
    return Plan(
        remat_version="0.1.0",
        torch_version="2.13.0+cpu",
        device="cpu",
        executor="eager",
        graph_hash="0123456789abcdef" * 4,
        memory_budget=1450,
        problem=PROBLEM,
        solution=solution,
        baseline=BASELINE,
        least_peak=1408,
        notes=("workspace of mm was assumed to be none",),
    )


@pytest.fixture
def step_plan(plan: Plan) -> StepPlan:
    """Two calls of one graph, the second inside the first, and a loss between them."""
    from remat.joined import Phase, join
    from remat.step_plan import StepPlan  # imports torch

    phases = [
        Phase("forward", 0, 0), Phase("forward", 1, 8), Phase("eager", -1, 64),
        Phase("backward", 1, 16), Phase("backward", 0, 32),
    ]  # fmt: skip
    problem = dataclasses.replace(plan.problem, fixed_bytes=0)
    joined = join([problem, problem], phases, 1000)
    schedule = joined.schedule([plan.solution.schedule, plan.baseline])
    solution = dataclasses.replace(
        plan.solution,
        problem_key=joined.problem.key,
        schedule=schedule,
        timeline=simulate(joined.problem, schedule),
    )
    plain = dataclasses.replace(
        plan,
        solution=dataclasses.replace(
            plan.solution, schedule=plan.baseline, timeline=plan.baseline_timeline
        ),
    )
    return StepPlan(
        memory_budget=5000,
        plans=(plan, plain),
        joined=joined,
        solution=solution,
        baseline=joined.schedule([plan.baseline, plan.baseline]),
        least_peak=1500,
    )
