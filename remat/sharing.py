"""One byte budget over the graphs of a step: the global solve, which makes its plan.

The recorded step becomes one joined problem (:mod:`remat.joined`), which the solvers of a single
graph solve; every call then gets its part of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from remat.budget import machine_memory
from remat.cache import known_plans
from remat.cost.device import find_device
from remat.joined import Joined, Phase, join
from remat.options import Options
from remat.partitioner import untouched
from remat.plan_log import STEP_PLAN, log_plan
from remat.plans import IN_STEP, Plan
from remat.report.text import budget_too_small
from remat.solvers.choose import least_peak, solve
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.units import format_bytes
from remat.step_plan import StepPlan


@dataclass(frozen=True)
class Recorded:
    """What one step was seen to do.

    Attributes:
        plans: of its calls, in the order of their forwards, as they ran.
        phases: in the order they ran.
        resident: bytes alive when it began.
        device: whose bytes.
    """

    plans: tuple[Plan, ...]
    phases: tuple[Phase, ...]
    resident: int
    device: torch.device

    def joined(self, resident: int) -> Joined:
        """The problem of the whole step, with that many bytes resident."""
        problems = [replace(plan.problem, fixed_bytes=0) for plan in self.plans]
        return join(problems, self.phases, resident)


def peak_of_step(plan: Plan, phases: Sequence[Phase]) -> int:
    """The peak of a step that calls one graph with ``plan``, the code outside the graph included.

    Args:
        phases: of the step, as it ran with whatever plan.
    """
    joined = join([replace(plan.problem, fixed_bytes=0)], phases, plan.problem.fixed_bytes)
    schedule = joined.schedule([plan.solution.schedule])
    peak = simulate(joined.problem, schedule, plan.link).peak
    return peak + plan.peak - plan.predicted  # what the generated code was seen to take more


def share(
    recorded: Recorded, resident: int, options: Options, starts: Sequence[StepPlan] = ()
) -> StepPlan:
    """Share ``options.memory_budget`` over the calls of a step, at the least extra time.

    Args:
        recorded: the step, as it ran with whatever plans.
        resident: bytes alive when the step to come begins.
        starts: plans of the same calls, say with other bytes beside them.

    Raises:
        BudgetTooSmall: with the figures of the whole step.
    """
    joined = recorded.joined(resident)
    problem = joined.problem
    baseline = joined.schedule([plan.baseline for plan in recorded.plans])
    known = [joined.schedule([plan.solution.schedule for plan in recorded.plans])]
    known += [joined.schedule([p.solution.schedule for p in start.plans]) for start in starts]
    timeline, link = simulate(problem.unrestricted, baseline), recorded.plans[0].link
    total, free = _memory(recorded, options, resident)
    budget = options.budget.resolve(
        baseline_peak=timeline.peak,
        least_peak=lambda: _least(problem, known, options, link),
        device_total=total,
        device_free=free,
    )
    assert budget is not None, "no budget, nothing to share"
    decided = options.keep or options.recompute
    if timeline.peak <= budget and options.solver == "auto" and not decided:
        solution = untouched(problem, baseline, simulate(problem, baseline), budget)
    else:
        solution = _as_run(joined, _solve(joined, known, options, budget, link), link)
        if solution.peak > budget:
            solution = _solve(joined, known[:0], options, budget, None)
    remembered = known_plans(problem, link)
    remembered.remember(solution.schedule)
    least = remembered.least
    schedules = joined.split(solution.schedule)
    shared = StepPlan(
        memory_budget=budget,
        plans=_plans(recorded, joined, solution, schedules, budget),
        joined=joined,
        solution=solution,
        baseline=baseline,
        least_peak=None if least is None else simulate(problem, least, link).peak,
    )
    log_plan(shared, STEP_PLAN)
    return shared


def _memory(
    recorded: Recorded, options: Options, resident: int
) -> tuple[int, int] | tuple[None, None]:
    """(all, what the step may take) of the device's bytes, if the budget speaks of them."""
    if not options.budget.needs_device:
        return None, None
    spec = find_device(options.device or recorded.device)
    if spec.torch_device is None:
        return spec.memory, spec.memory
    total, free = machine_memory(spec.torch_device)
    return total, free + resident


def _least(
    problem: Problem, starts: Sequence[Schedule], options: Options, link: Link | None
) -> int:
    """The least peak that is found, remembered for the same problem."""
    known = known_plans(problem, link)
    if known.least is None:
        found = least_peak(
            problem, time_limit=options.time_limit, progress=options.progress, link=link
        )
        candidates = [found.schedule, *starts]
        known.least = min(candidates, key=lambda schedule: simulate(problem, schedule, link).peak)
        known.remember(known.least)
    return simulate(problem, known.least, link).peak


def _solve(
    joined: Joined,
    starts: Sequence[Schedule],
    options: Options,
    budget: int,
    link: Link | None,
) -> Solution:
    problem, calls = joined.problem, joined.calls
    known = known_plans(problem, link)
    solution = solve(
        problem,
        memory_budget=budget,
        solver=options.solver,
        time_limit=options.time_limit,
        gap=options.gap,
        every_n_layers=options.every_n_layers or 1,
        link=link,
        starts=(*starts, *known.schedules) if options.solver == "auto" else (),
        progress=options.progress,
    )
    if solution.fits and not (options.solver != solution.solver == "auto"):
        return solution
    if solution.fits:
        raise BudgetTooSmall(
            f"solver {options.solver!r} has no plan for the whole step within memory_budget "
            f'{format_bytes(budget)} ({budget} bytes); solver="auto" has one that peaks at '
            f"{format_bytes(solution.peak)}",
            memory_budget=budget,
            least_peak=solution.peak,
            peak_lower_bound=solution.peak_lower_bound,
        )
    error = budget_too_small(problem, solution, budget)
    together = "several graphs together" if len(calls) > 1 else "with the code outside the graph"
    raise BudgetTooSmall(
        f"Over the whole step, {together}: {error}",
        memory_budget=budget,
        least_peak=error.least_peak,
        peak_lower_bound=error.peak_lower_bound,
    )


def _as_run(joined: Joined, solution: Solution, link: Link | None) -> Solution:
    """The solution with every copy inside its own graph, which is where it can be waited for."""
    schedule = joined.schedule(joined.split(solution.schedule))
    if schedule == solution.schedule or not any(s.kind == "offload" for s in schedule.steps):
        return solution
    timeline = simulate(joined.problem, schedule, link)
    lower = min(solution.lower_bound, timeline.seconds)
    return replace(solution, schedule=schedule, timeline=timeline, lower_bound=lower)


def _plans(
    recorded: Recorded,
    joined: Joined,
    solution: Solution,
    schedules: Sequence[Schedule],
    budget: int,
) -> tuple[Plan, ...]:
    """The plan of every call: its peak is the whole step's while it runs."""
    peaks = joined.peaks(solution.schedule, solution.timeline)
    plans = []
    for call, (plan, problem, schedule) in enumerate(
        zip(recorded.plans, joined.calls, schedules, strict=True)
    ):
        peak = max(at for phase, at in zip(joined.phases, peaks, strict=True) if phase.call == call)
        own = simulate(problem, schedule, plan.link).peak
        problem = replace(problem, fixed_bytes=max(0, peak - own))
        timeline = simulate(problem, schedule, plan.link)
        plans.append(
            replace(
                plan,
                memory_budget=budget,
                problem=problem,
                solution=replace(
                    plan.solution,
                    problem_key=problem.key,
                    schedule=schedule,
                    timeline=timeline,
                    memory_budget=budget,
                    status="feasible" if solution.solver != "baseline" else "optimal",
                    lower_bound=min(timeline.seconds, Structure(problem).required_seconds),
                    peak_lower_bound=problem.fixed_bytes,
                    floor_op=-1,
                    solver=solution.solver,
                    solve_time=solution.solve_time,
                ),
                least_peak=None,
                # Alone, a plan holds what it returns until backward ends; the caller may drop it.
                replayed_peak=peak if own > peak else None,
                notes=(
                    *(note for note in plan.notes if not note.startswith(IN_STEP)),
                    _note(joined, solution, call),
                ),
            )
        )
    return tuple(plans)


def _note(joined: Joined, solution: Solution, call: int) -> str:
    return (
        f"{IN_STEP} call {call + 1} of {len(joined.calls)} in one that peaks at "
        f"{format_bytes(solution.peak)}; what the other graphs and the code between them hold "
        "while it runs counts as resident here"
    )
