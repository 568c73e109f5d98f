"""What a person inspects and stores: a problem, its solution, and what to compare it with.

A stored plan holds decisions and steps, and only the few figures that tell whether it is whole:
bytes and seconds are simulated again when it is read, so there is one truth.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from remat.solvers.errors import InvalidProblem, InvalidSchedule, PlanMismatch
from remat.solvers.problem import Op, Problem
from remat.solvers.schedule import Decision, Schedule, Solution, Step, Timeline, decisions
from remat.solvers.simulate import simulate
from remat.solvers.units import format_bytes

FORMAT: Final = "remat.plan/1"

Action = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What happens to one forward value that backward needs.

    Attributes:
        value: its name.
        action: ``"keep"``, ``"recompute"`` or ``"offload"``.
        bytes: what it takes.
        layer, source: the module and the source line of the op that makes it.
        seconds: what running that op again costs in all; its other outputs share it.
    """

    value: str
    action: Action
    bytes: int
    layer: str
    source: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What a plan does to one layer, in bytes and seconds.

    Attributes:
        layer: the module's path; empty for what belongs to none.
        baseline_bytes: saved for backward without remat.
        kept_bytes, recomputed_bytes, offloaded_bytes: what becomes of the values backward needs.
        extra_seconds: what running the layer's ops again costs.
    """

    layer: str
    baseline_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    extra_seconds: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One half of the step, without remat and with it. Recomputation belongs to backward."""

    phase: Literal["forward", "backward"]
    baseline_seconds: float
    seconds: float
    baseline_flops: int
    flops: int
    baseline_peak: int
    peak: int


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
        """Bytes that wait for backward once forward has ended, outputs aside."""
        return sum(row.bytes for row in self.decisions.values() if row.action == "keep")

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
            timeline=simulate(problem, self.solution.schedule),
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
        again = _runs_again(self.solution.schedule)
        rows = {}
        for value, decision in decisions(self.problem, self.solution.schedule).items():
            producer = self.problem.producer[value]
            op, held = self.problem.ops[producer], self.problem.values[value]
            rows[held.name] = DecisionRow(
                value=held.name,
                action=decision.value,
                bytes=held.bytes,
                layer=op.layer,
                source=op.source,
                seconds=again[producer] * op.seconds,
            )
        return rows

    @property
    def phases(self) -> tuple[PhaseRow, PhaseRow]:
        """Forward and backward, without remat and with it."""
        old, new = self.baseline_timeline, self.solution.timeline
        forward = PhaseRow(
            "forward",
            old.forward_seconds,
            new.forward_seconds,
            old.forward_flops,
            new.forward_flops,
            old.forward_peak,
            new.forward_peak,
        )
        backward = PhaseRow(
            "backward",
            old.seconds - old.forward_seconds,
            new.seconds - new.forward_seconds,
            old.flops - old.forward_flops,
            new.flops - new.forward_flops,
            old.backward_peak,
            new.backward_peak,
        )
        return forward, backward

    def by_layer(self) -> tuple[LayerRow, ...]:
        """One row for each layer that saves or recomputes anything, in program order."""
        layers = dict.fromkeys(op.layer for op in self.problem.ops)
        saved = self._bytes_by_layer(self.baseline, Decision.KEEP)
        kept, recomputed, offloaded = (
            self._bytes_by_layer(self.solution.schedule, decision)
            for decision in (Decision.KEEP, Decision.RECOMPUTE, Decision.OFFLOAD)
        )
        extra: dict[str, float] = {}
        for index, times in _runs_again(self.solution.schedule).items():
            op = self.problem.ops[index]
            extra[op.layer] = extra.get(op.layer, 0.0) + times * op.seconds
        rows = (
            LayerRow(x, saved[x], kept[x], recomputed[x], offloaded[x], extra.get(x, 0.0))
            for x in layers
        )
        return tuple(row for row in rows if any(getattr(row, f) for f in row.__slots__[1:]))

    def _bytes_by_layer(self, schedule: Schedule, wanted: Decision) -> Counter[str]:
        total: Counter[str] = Counter()
        for value, decision in decisions(self.problem, schedule).items():
            if decision is wanted:
                layer = self.problem.ops[self.problem.producer[value]].layer
                total[layer] += self.problem.values[value].bytes
        return total

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
        data = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        path, raw = Path(path), data.encode()
        path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what :meth:`save` wrote, and simulate it again.

        Raises:
            PlanMismatch: it is no plan, is of another format, or its figures do not follow from
                its steps.
            OSError: it cannot be read.
        """
        raw = Path(path).read_bytes()
        try:
            data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        except (ValueError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PlanMismatch(f"{path} is no stored plan: not JSON ({error})") from error
        try:
            return Plan.from_json(data)
        except PlanMismatch as error:
            raise PlanMismatch(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data in the format ``remat.plan/1``."""
        return {
            "format": FORMAT,
            "remat_version": self.remat_version,
            "torch_version": self.torch_version,
            "device": self.device,
            "executor": self.executor,
            "graph_hash": self.graph_hash,
            "memory_budget": self.memory_budget,
            "problem": self.problem.to_json(),
            "solution": _solution_to_json(self.solution),
            "baseline": _steps_to_json(self.baseline),
            "least_peak": self.least_peak,
            "notes": list(self.notes),
            "replayed_peak": self.replayed_peak,
            "keep": list(self.keep),
            "recompute": list(self.recompute),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; raises as :meth:`load` does."""
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        if found != FORMAT:
            raise PlanMismatch(
                f"format is {found!r}, this version of remat reads {FORMAT!r}; plan again with "
                "remat.plan"
            )
        try:
            problem = Problem.from_json(data["problem"])
            plan = Plan(
                problem=problem,
                solution=_solution_from_json(problem, data["solution"]),
                baseline=_steps_from_json(data["baseline"]),
                notes=tuple(data["notes"]),
                replayed_peak=data.get("replayed_peak"),
                keep=tuple(data.get("keep", ())),
                recompute=tuple(data.get("recompute", ())),
                **{name: data[name] for name in _PLAIN},
            )
            _ = plan.baseline_timeline  # a baseline that cannot run is refused here, not when read
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, InvalidProblem | InvalidSchedule):
                raise PlanMismatch(f"the stored plan cannot run: {error}") from error
            raise PlanMismatch(f"malformed plan: {type(error).__name__} {error}") from error
        return plan

    def __str__(self) -> str:
        from remat.report.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        budget = "None" if self.memory_budget is None else format_bytes(self.memory_budget)
        return (
            f"<Plan {self.graph_hash[:12]} budget {budget} peak {format_bytes(self.peak)} "
            f"extra time {self.extra_time:.1%}>"
        )


_PLAIN: Final = (
    "remat_version", "torch_version", "device", "executor",
    "graph_hash", "memory_budget", "least_peak",
)  # fmt: skip
_STORED: Final = (
    "problem_key", "memory_budget", "status", "peak_lower_bound", "floor_op", "solver",
    "solve_time",
)  # fmt: skip


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


def _runs_again(schedule: Schedule) -> Counter[int]:
    """How often each op runs beyond the first time."""
    runs = Counter(schedule.computes)
    return Counter({op: times - 1 for op, times in runs.items() if times > 1})


def _steps_to_json(schedule: Schedule) -> list[list[Any]]:
    return [[step.kind, step.index] for step in schedule.steps]


def _steps_from_json(rows: list[list[Any]]) -> Schedule:
    kinds = ("compute", "free", "offload", "reload", "wait")
    for kind, index in rows:
        if kind not in kinds or not isinstance(index, int) or index < 0:
            raise InvalidSchedule(f"unknown step {[kind, index]!r}")
    return Schedule(tuple(Step(kind, index) for kind, index in rows))


def _solution_to_json(solution: Solution) -> dict[str, Any]:
    # Nothing beats infinitely many seconds where no schedule fits; JSON has no infinity.
    bound = solution.lower_bound if math.isfinite(solution.lower_bound) else None
    return {
        **{name: getattr(solution, name) for name in _STORED},
        "steps": _steps_to_json(solution.schedule),
        "peak": solution.peak,
        "lower_bound": bound,
        "failures": list(solution.failures),
    }


def _solution_from_json(problem: Problem, data: Mapping[str, Any]) -> Solution:
    schedule = _steps_from_json(data["steps"])
    timeline = simulate(problem, schedule)
    bound = data["lower_bound"]
    solution = Solution(
        schedule=schedule,
        timeline=timeline,
        lower_bound=math.inf if bound is None else bound,
        failures=tuple(data["failures"]),
        **{name: data[name] for name in _STORED},
    )
    if solution.problem_key != problem.key:
        raise PlanMismatch(
            "the solution belongs to another problem: the file was edited, or written by another "
            "version of remat; plan again with remat.plan"
        )
    if timeline.peak != data["peak"]:
        raise PlanMismatch(
            f"the stored peak is {data['peak']} bytes, but its steps peak at {timeline.peak}: the "
            "file was edited, or written by another version of remat; plan again with remat.plan"
        )
    return solution
