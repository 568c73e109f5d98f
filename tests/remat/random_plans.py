"""A made-up training step of a few dozen ops, and a plan for it that does a bit of everything."""

from __future__ import annotations

import random
from typing import Final

from remat.plans import Plan
from remat.solvers.demand import missing_ops
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Decision, Schedule, Solution, Step, decisions, with_frees
from remat.solvers.simulate import simulate


def nested_plan(seed: int, length: int = 16) -> Plan:
    """Skip connections, ops of two outputs, an op that runs once, inputs that are written over."""
    rng = random.Random(seed)
    problem = _problem(rng, length)
    baseline = Schedule.from_computes(problem, range(len(problem.ops)))
    schedule = _forgetful(problem, rng)
    timeline = simulate(problem, schedule)
    return Plan(
        remat_version="0.1.0",
        torch_version="2.13.0+cpu",
        device="cpu",
        executor="eager",
        graph_hash=f"{seed:064x}",
        memory_budget=timeline.peak,
        problem=problem,
        solution=Solution(
            problem_key=problem.key,
            schedule=schedule,
            timeline=timeline,
            memory_budget=timeline.peak,
            status="feasible",
            lower_bound=problem.base_seconds,
            peak_lower_bound=problem.fixed_bytes,
            floor_op=-1,
            solver="random",
        ),
        baseline=baseline,
    )


LINK: Final = Link(300.0, 200.0, 0.125)


def offloading_schedule(plan: Plan) -> Schedule:
    """The plan's schedule with every second kept value away between forward and its first read."""
    problem, schedule = plan.problem, plan.solution.schedule
    kept = [v for v, d in decisions(problem, schedule).items() if d is Decision.KEEP]
    away = [v for v in kept if problem.values[v].output is None][::2]
    boundary = schedule.boundary(problem)
    events: list[Step] = []
    back: set[int] = set()
    for position, step in enumerate(schedule.steps):
        if position == boundary:
            events += [Step("offload", v) for v in away] + [Step("wait", v) for v in away]
        reads = problem.ops[step.index].reads if step.kind == "compute" else ()
        for v in [v for v in away if v in reads and v not in back and position >= boundary]:
            events += [Step("reload", v), Step("wait", v)]
            back.add(v)
        if step.kind != "free":
            events.append(step)
    return with_frees(problem, events)


def _problem(rng: random.Random, length: int) -> Problem:
    values = [Value("x", 40, owned=True)]
    ops: list[Op] = []
    made: list[list[int]] = [[0]]
    for k in range(length):
        count = 1 + (k % 5 == 2)
        writes = [len(values) + n for n in range(count)]
        last = k == length - 1
        values += [
            Value(f"a{k}_{n}", rng.randint(1, 900), output="forward" if last else None)
            for n in range(count)
        ]
        reads = {made[-1][0], *([rng.choice(rng.choice(made))] if k % 3 == 1 else [])}
        ops.append(
            Op(
                f"f{k}", "forward", tuple(sorted(reads)), tuple(writes), rng.randint(1, 9) / 8,
                rng.randint(1, 90), workspace=rng.choice((0, 0, 700)), target="aten.mm.default",
                rerunnable=k != 5, layer=f"net.blocks.{k // 4}.part{k % 4}", source=f"net.py:{k}",
            )
        )  # fmt: skip
        made.append(writes)
    values.append(Value("tangent", 4, tangent=True))
    gradient = len(values) - 1
    for k in reversed(range(length)):
        values.append(Value(f"g{k}", rng.randint(1, 900), output=None if k else "backward"))
        reads = {gradient, *ops[k].reads, *(made[k + 1] if k % 2 else [])}
        over = -min(values[gradient].bytes, values[-1].bytes) if k % 4 == 3 else 0
        ops.append(
            Op(
                f"b{k}", "backward", tuple(sorted(reads)), (len(values) - 1,),
                rng.randint(1, 9) / 4,
                rng.randint(1, 90), workspace=over, target="aten.mm.default", layer=ops[k].layer,
            )
        )  # fmt: skip
        gradient = len(values) - 1
    return Problem(tuple(values), tuple(ops), fixed_bytes=500, name="made up", cost="made up")


def _forgetful(problem: Problem, rng: random.Random) -> Schedule:
    """Half of what could be computed again is dropped after forward, some of it once more."""
    pinned = {
        v
        for v, value in enumerate(problem.values)
        if value.output or value.owned or value.tangent or not _again(problem, v)
    }
    computes = list(problem.forward)
    present = {v for op in computes for v in problem.ops[op].writes if rng.random() < 0.5} | pinned
    for index in problem.backward:
        for runs in (*missing_ops(problem, present, problem.ops[index].reads), index):
            computes.append(runs)
            present.update(problem.ops[runs].writes)
        present = {v for v in present if v in pinned or rng.random() < 0.7}
    return Schedule.from_computes(problem, computes)


def _again(problem: Problem, value: int) -> bool:
    op = problem.ops[problem.producer[value]]
    return op.phase == "forward" and op.rerunnable
