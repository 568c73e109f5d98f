"""What a person inspects and stores: a problem, its solution, and what to compare it with.

Its rows are in :mod:`remat.plan_rows`, its file format is in :mod:`remat.plan_json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from remat.plan_rows import (
    DecisionRow,
    LayerRow,
    PhaseRow,
    decision_rows,
    kept_bytes,
    layer_rows,
    phase_rows,
)
from remat.solvers.errors import PlanMismatch
from remat.solvers.problem import Link, Op, Problem
from remat.solvers.schedule import Schedule, Solution, Timeline
from remat.solvers.simulate import simulate
from remat.solvers.units import format_bytes

if TYPE_CHECKING:
    from remat.report.html_curve import Curve


IN_STEP: Final = "in the step:"
"""How the note begins that says what place a plan has in a step."""


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A graph that got no plan (nothing trains in it, say), and why."""

    reason: str
    source: str = ""

    def __str__(self) -> str:
        return f"not planned: {self.reason}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, repr=False)
class Plan:
    """How one captured graph runs within a memory budget. All sizes in bytes, all times in seconds.

    Attributes:
        remat_version, torch_version: what made it.
        device: what its costs are for.
        executor: who runs it.
        graph_hash: of the joint graph it belongs to.
        memory_budget: None where none was asked for.
        problem, solution: what was asked of the solver, and its answer.
        baseline: what the executor does unasked.
        least_peak: the smallest peak a plan was found for; None if nobody had to know.
        keep, recompute: the patterns of modules that the user decided about.
        notes: for people: ops whose workspace was assumed, what was not planned.
        replayed_peak: under inductor, the peak of the code it generated, which is what counts;
            None where there is none: the eager executor follows its schedule to the byte.
        link: how fast values could be offloaded; None: none may be.
        offload: where to, ``"host"`` or a directory.
    """

    remat_version: str
    torch_version: str
    device: str
    executor: str
    graph_hash: str
    memory_budget: int | None
    problem: Problem
    solution: Solution
    baseline: Schedule
    least_peak: int | None = None
    notes: tuple[str, ...] = ()
    replayed_peak: int | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    link: Link | None = None
    offload: str | None = None

    @cached_property
    def baseline_timeline(self) -> Timeline:
        """The judge's account of the baseline."""
        return simulate(self.problem.unrestricted, self.baseline)

    @property
    def peak(self) -> int:
        """Peak of the step, parameters and inputs included: as replayed, else as predicted."""
        return self.solution.peak if self.replayed_peak is None else self.replayed_peak

    @property
    def predicted(self) -> int:
        """The peak that was estimated before anything was compiled."""
        return self.solution.peak

    @property
    def baseline_peak(self) -> int:
        """Predicted peak without remat."""
        return self.baseline_timeline.peak

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait for backward once forward has ended, what forward returns aside."""
        return kept_bytes(self.problem, self.solution.schedule)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are copied to ``offload`` in forward and come back in backward."""
        return sum(row.bytes for row in self.decisions.values() if row.action == "offload")

    def shifted(self, change: int, *, budget_too: bool) -> Plan:
        """The same plan with ``change`` more bytes resident.

        Args:
            budget_too: the budget is a fraction, and moves along.
        """
        fixed_bytes = self.problem.fixed_bytes + change
        problem = dataclasses.replace(self.problem, fixed_bytes=fixed_bytes)
        budget = self.memory_budget
        if budget_too and budget is not None:
            budget += change
        solution = dataclasses.replace(
            self.solution,
            problem_key=problem.key,
            timeline=simulate(problem, self.solution.schedule, self.link),
            memory_budget=budget,
            peak_lower_bound=self.solution.peak_lower_bound + change,
        )
        least, replayed = (
            None if peak is None else peak + change
            for peak in (self.least_peak, self.replayed_peak)
        )
        return dataclasses.replace(
            self,
            problem=problem,
            solution=solution,
            memory_budget=budget,
            least_peak=least,
            replayed_peak=replayed,
        )

    @property
    def in_step(self) -> bool:
        """Whether it is one call of a step that was planned as a whole: what else is alive beside
        it differs from phase to phase, and only the step's plan knows.
        """
        return any(note.startswith(f"{IN_STEP} call ") for note in self.notes)

    @property
    def several_calls(self) -> bool:
        """False: it is the plan of one call."""
        return False

    @property
    def extra_time(self) -> float:
        """Predicted time over the baseline's: 0.08 is 8 % more."""
        return _extra(self.solution.seconds, self.baseline_timeline.seconds)

    @property
    def extra_flops(self) -> float:
        """Floating point operations over the baseline's: 0.08 is 8 % more."""
        return _extra(self.solution.timeline.flops, self.baseline_timeline.flops)

    @property
    def gap(self) -> float:
        """How much faster a better plan within the budget could at most be (0.01 = 1 %)."""
        return self.solution.gap

    @cached_property
    def decisions(self) -> Mapping[str, DecisionRow]:
        """For every forward value that backward reads, by name, in program order."""
        return decision_rows(self.problem, self.solution.schedule)

    @property
    def phases(self) -> tuple[PhaseRow, PhaseRow]:
        """Forward and backward, without remat and with it."""
        return phase_rows(self.baseline_timeline, self.solution.timeline)

    def by_layer(self) -> tuple[LayerRow, ...]:
        """One row for each layer that saves or recomputes anything, in program order."""
        return layer_rows(self.problem, self.solution.schedule, self.baseline)

    def check(self, graph_hash: str, torch_version: str) -> None:
        """Make sure the plan belongs to this graph, under this torch.

        Raises:
            PlanMismatch: says what differs, and what to do.
        """
        if graph_hash != self.graph_hash:
            raise PlanMismatch(
                f"the plan was made for another graph: its hash is {self.graph_hash[:12]}, this "
                f"graph's is {graph_hash[:12]} (another model, shape, dtype or loss); plan "
                "this one with remat.plan, or leave plan= out"
            )
        if _public(torch_version) != _public(self.torch_version):
            raise PlanMismatch(
                f"the plan was made under torch {self.torch_version}, this is torch "
                f"{torch_version}, whose kernels may need other memory; plan again with remat.plan"
            )

    def save(self, path: str | Path) -> None:
        """Write canonical JSON, gzip-compressed where the path ends in ``.gz``."""
        from remat.plan_json import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what :meth:`save` wrote, and simulate it again.

        Raises:
            PlanMismatch: it is no plan, is of another format, or its figures do not follow from
                its steps.
            OSError: it cannot be read.
        """
        from remat.plan_json import load_plan

        return load_plan(path)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data in the format ``remat.plan/1``."""
        from remat.plan_json import plan_to_json

        return plan_to_json(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; raises as :meth:`load` does."""
        from remat.plan_json import plan_from_json

        return plan_from_json(data)

    def to_html(self, path: str | Path, *, frontier: Curve | None = None) -> None:
        """Write one self-contained page: memory over the step, every decision, graph by layer.

        Args:
            path: overwritten if it is there.
            frontier: what ``remat.frontier`` gave for the same step, to be drawn.
        """
        from remat.report.html import subject_of, write_page

        write_page(path, subject_of(self), None if frontier is None else frontier.points)

    def why(self, value: str) -> str:
        """The sentence that explains one decision: its reason, and what the other would do.

        Args:
            value: a name, as in ``decisions``.

        Raises:
            InvalidOption: the plan has no such value; the nearest names are given.
        """
        from remat.report.why import why

        return why(self, value)

    def __str__(self) -> str:
        from remat.report.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        budget = "None" if self.memory_budget is None else format_bytes(self.memory_budget)
        return (
            f"<Plan {self.graph_hash[:12]} budget {budget} peak {format_bytes(self.peak)} "
            f"extra time {self.extra_time:.1%}>"
        )


def op_at(problem: Problem, schedule: Schedule, step: int) -> Op | None:
    """The op that runs at a step of the schedule, or ran last before it; None if none did."""
    for position in range(step, -1, -1):
        if schedule.steps[position].kind == "compute":
            return problem.ops[schedule.steps[position].index]
    return None


def _extra(new: float, old: float) -> float:
    return new / old - 1 if old > 0 else 0.0


def _public(version: str) -> str:
    """``2.13.0+cpu`` and ``2.13.0+cu130`` are one version: the device is compared by itself."""
    return version.split("+")[0]
