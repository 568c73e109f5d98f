"""One byte budget over the graphs of a step: the global solve, and its plan.

The recorded step becomes one joined problem (:mod:`remat.joined`), which the solvers of a single
graph solve; every call then gets its part of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from remat.budget import machine_memory
from remat.cache import known_plans
from remat.cost.device import find_device
from remat.joined import Joined, Phase, join, kept_bytes
from remat.options import Options
from remat.partitioner import untouched
from remat.plan_log import STEP_PLAN, log_plan
from remat.plans import Plan
from remat.report.text import budget_too_small
from remat.solvers.choose import least_peak, solve
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from remat.report.html_curve import Curve

PLACE: Final = "in the step:"
"""How the note begins that says what place a plan has in a step."""


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


@dataclass(frozen=True, repr=False)
class StepPlan:
    """How the graphs of one step, and the code outside them, share a memory budget.

    Sizes in bytes, times in seconds.

    Attributes:
        memory_budget: of the whole step.
        plans: one for each call of a graph, in the order of their forwards; a graph that is called
            several times stands there as often.
        joined, solution: the problem of the whole step, and the solver's answer.
        baseline: what the executor does unasked.
        least_peak: the smallest peak a plan was found for; None if nobody had to know.
    """

    memory_budget: int
    plans: tuple[Plan, ...]
    joined: Joined
    solution: Solution
    baseline: Schedule
    least_peak: int | None = None

    @property
    def link(self) -> Link | None:
        """How fast values could be offloaded; None: none may be."""
        return self.plans[0].link if self.plans else None

    @property
    def peak(self) -> int:
        """Predicted peak of the whole step, resident bytes included."""
        return self.solution.peak

    @property
    def baseline_peak(self) -> int:
        """Predicted peak without remat."""
        return simulate(self.joined.problem.unrestricted, self.baseline).peak

    @property
    def extra_time(self) -> float:
        """Predicted time in the graphs over the baseline's: 0.08 is 8 % more."""
        old = simulate(self.joined.problem.unrestricted, self.baseline).seconds
        return self.solution.seconds / old - 1 if old > 0 else 0.0

    @property
    def peaks(self) -> tuple[int, ...]:
        """Predicted peak of every phase of ``joined.phases``."""
        return self.joined.peaks(self.solution.schedule, self.solution.timeline)

    @property
    def beside_bytes(self) -> int:
        """Bytes at the peak that no graph holds: gradients made before, what passes between the
        graphs, what eager code holds.
        """
        peaks = self.peaks
        return self.joined.phases[max(range(len(peaks)), key=lambda at: peaks[at])].beside

    @property
    def eager_peak(self) -> int:
        """Predicted peak while code runs that no graph holds; 0 if there is none."""
        rows = zip(self.joined.phases, self.peaks, strict=True)
        return max((peak for phase, peak in rows if phase.kind == "eager"), default=0)

    def __str__(self) -> str:
        resident = self.joined.problem.fixed_bytes
        least = "" if self.least_peak is None else f", least {format_bytes(self.least_peak)}"
        seconds = format_seconds(self.solution.solve_time)
        lines = [
            f"step       {len(self.plans)} graph call{'s' * (len(self.plans) > 1)}",
            f"budget     {format_bytes(self.memory_budget)}",
            f"peak       {format_bytes(self.peak)} (without remat "
            f"{format_bytes(self.baseline_peak)}{least})",
            f"resident   {format_bytes(resident)} of that: parameters, inputs, state",
            f"beside     {format_bytes(self.beside_bytes)} of that: gradients, what passes between "
            "graphs, eager code",
            f"eager      peak {format_bytes(self.eager_peak)} while code outside the graphs runs",
            f"extra      {100 * self.extra_time:+.1f} % time in the graphs "
            f"({self.solution.solver}, {seconds})",
            "",
            f"{'phase':<14}{'beside':>12}{'kept':>12}{'peak':>12}",
        ]
        for phase, peak in zip(self.joined.phases, self.peaks, strict=True):
            name = phase.kind if phase.call < 0 else f"{phase.kind} {phase.call}"
            kept = self.kept_bytes(phase.call) if phase.kind == "forward" else 0
            lines.append(
                f"{name:<14}{format_bytes(phase.beside):>12}"
                f"{format_bytes(kept) if kept else '':>12}{format_bytes(peak):>12}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<StepPlan {len(self.plans)} calls budget {format_bytes(self.memory_budget)} peak "
            f"{format_bytes(self.peak)} extra time {self.extra_time:.1%}>"
        )

    def kept_bytes(self, call: int) -> int:
        """Bytes that call keeps for its backward, what it returns aside."""
        plan = self.plans[call]
        return kept_bytes(plan.problem, plan.solution.schedule)

    def shifted(self, change: int, *, budget_too: bool) -> StepPlan:
        """The same plans with ``change`` more bytes resident.

        Args:
            budget_too: the budget is a fraction, and moves along.
        """
        budget = self.memory_budget + (change if budget_too else 0)
        fixed_bytes = self.joined.problem.fixed_bytes + change
        problem = replace(self.joined.problem, fixed_bytes=fixed_bytes)
        solution = replace(
            self.solution,
            problem_key=problem.key,
            timeline=simulate(problem, self.solution.schedule, self.link),
            memory_budget=budget,
            peak_lower_bound=self.solution.peak_lower_bound + change,
        )
        return StepPlan(
            memory_budget=budget,
            plans=tuple(plan.shifted(change, budget_too=budget_too) for plan in self.plans),
            joined=replace(self.joined, problem=problem),
            solution=solution,
            baseline=self.baseline,
            least_peak=None if self.least_peak is None else self.least_peak + change,
        )

    def save(self, path: str | Path) -> None:
        """Write canonical JSON, gzip-compressed where the path ends in ``.gz``."""
        from remat.step_json import save_step_plan

        save_step_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> StepPlan:
        """Read what :meth:`save` wrote, and simulate it again.

        Raises:
            PlanMismatch: it is no plan of a step, or its figures do not follow from its steps.
            OSError: it cannot be read.
        """
        from remat.step_json import load_step_plan

        return load_step_plan(path)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data in the format ``remat.step/1``."""
        from remat.step_json import step_plan_to_json

        return step_plan_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StepPlan:
        """The inverse of :meth:`to_json`; raises as :meth:`load` does."""
        from remat.step_json import step_plan_from_json

        return step_plan_from_json(data)

    def to_html(self, path: str | Path, *, frontier: Curve | None = None) -> None:
        """Write one self-contained page, as :meth:`remat.Plan.to_html` does for one graph."""
        from remat.report.html import write_page
        from remat.step_page import subject_of_step

        write_page(path, subject_of_step(self), None if frontier is None else frontier.points)

    def peak_beside(self, phases: Sequence[Phase], resident: int) -> int:
        """The peak of these plans where other bytes are alive beside the graphs."""
        joined = join(self.joined.calls, phases, resident)
        schedule = joined.schedule([plan.solution.schedule for plan in self.plans])
        return simulate(joined.problem, schedule, self.link).peak


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
                    *(note for note in plan.notes if not note.startswith(PLACE)),
                    _note(joined, solution, call),
                ),
            )
        )
    return tuple(plans)


def _note(joined: Joined, solution: Solution, call: int) -> str:
    return (
        f"{PLACE} call {call + 1} of {len(joined.calls)} in one that peaks at "
        f"{format_bytes(solution.peak)}; what the other graphs and the code between them hold "
        "while it runs counts as resident here"
    )
