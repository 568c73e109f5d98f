"""How the graphs of one step, and the code outside them, share a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.joined import Joined, Phase, join
from remat.plan_rows import DecisionRow, LayerRow, decision_rows, layer_rows
from remat.plans import Plan
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution, Timeline
from remat.solvers.simulate import simulate
from remat.solvers.units import format_bytes

if TYPE_CHECKING:
    from remat.report.html_curve import Curve


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
    def offload(self) -> str | None:
        """Where to, ``"host"`` or a directory."""
        return self.plans[0].offload if self.plans else None

    @cached_property
    def problem(self) -> Problem:
        """That of ``joined``, its layers named by their call where there are several calls."""
        return self.joined.problem_by_call

    @cached_property
    def baseline_timeline(self) -> Timeline:
        """The judge's account of the baseline."""
        return simulate(self.joined.problem.unrestricted, self.baseline)

    @property
    def keep(self) -> tuple[str, ...]:
        """The patterns of the user's that any of its plans keeps."""
        return tuple(dict.fromkeys(pattern for plan in self.plans for pattern in plan.keep))

    @property
    def in_step(self) -> bool:
        """False: it is the step."""
        return False

    @property
    def several_calls(self) -> bool:
        """Whether layers are named by their call."""
        return len(self.plans) > 1

    @property
    def peak(self) -> int:
        """Predicted peak of the whole step, resident bytes included."""
        return self.solution.peak

    @property
    def baseline_peak(self) -> int:
        """Predicted peak without remat."""
        return self.baseline_timeline.peak

    @property
    def extra_time(self) -> float:
        """Predicted time in the graphs over the baseline's: 0.08 is 8 % more."""
        old = self.baseline_timeline.seconds
        return self.solution.seconds / old - 1 if old > 0 else 0.0

    @property
    def extra_flops(self) -> float:
        """Floating point operations in the graphs over the baseline's: 0.08 is 8 % more."""
        old = self.baseline_timeline.flops
        return self.solution.timeline.flops / old - 1 if old > 0 else 0.0

    @property
    def gap(self) -> float:
        """How much faster a better plan within the budget could at most be (0.01 = 1 %)."""
        return self.solution.gap

    @cached_property
    def decisions(self) -> Mapping[str, DecisionRow]:
        """For every forward value that backward reads, in program order.

        By name: ``"0: addmm"`` is the value ``addmm`` of the first call.
        """
        return decision_rows(self.problem, self.solution.schedule)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are copied to ``offload`` in forward and come back in backward."""
        return sum(row.bytes for row in self.decisions.values() if row.action == "offload")

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of its plans, each once."""
        return tuple(dict.fromkeys(note for plan in self.plans for note in plan.notes))

    def by_layer(self) -> tuple[LayerRow, ...]:
        """One row for each layer that saves or recomputes anything, in program order."""
        return layer_rows(self.problem, self.solution.schedule, self.baseline)

    def why(self, value: str) -> str:
        """The sentence that explains one decision: its reason, and what the other would do to the
        peak of the whole step.

        Args:
            value: a name, as in ``decisions``; without its call where there is one of that name.

        Raises:
            InvalidOption: the step has no such value; the nearest names are given.
        """
        from remat.report.why import why

        return why(self, value)

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
        from remat.step_text import step_text

        return step_text(self)

    def __repr__(self) -> str:
        return (
            f"<StepPlan {len(self.plans)} calls budget {format_bytes(self.memory_budget)} peak "
            f"{format_bytes(self.peak)} extra time {self.extra_time:.1%}>"
        )

    def kept_bytes(self, call: int) -> int:
        """Bytes that call keeps for its backward, what it returns aside."""
        plan = self.plans[call]
        return plan.kept_bytes

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
