"""One graph through inductor: plan, compile, replay the peak, and tighten where it is too high.

The plan is made with a model of fusion; what counts is the peak replayed from the code inductor
generated. Where that is over the budget, the plan is made for less and the graph compiled again, at
most four times. What was found is kept on disk beside inductor's caches: a second process, whose
step comes out of those caches without any planning, finds its plan there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.cost.device import find_device
from remat.cost.link import offloading
from remat.cost.profile import Profiler
from remat.cost.store import environment
from remat.executors import inductor
from remat.executors.workspaces import MeasuredWorkspaces
from remat.executors.wrapper import replay_step
from remat.options import Options
from remat.partitioner import Ledger, partition
from remat.passes.storages import main_device
from remat.plan_store import PlanStore, StoredPlan
from remat.plans import Plan
from remat.solvers.errors import BudgetTooSmall, PlanMismatch
from remat.solvers.units import format_bytes
from remat.version import __version__

TIGHTENED: Final = 4
"""How often a graph is compiled again for a lower budget."""


# Seconds the solver may take for each captured op: compiling one takes some twenty times as long.
_PLANNING: Final = 0.003
_LEAST_PLANNING: Final = 0.5


@dataclass(frozen=True)
class InductorStep:
    """A compiled step and its plan."""

    run: Callable[..., Any]
    plan: Plan


def compile_step(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, ledger: Ledger
) -> InductorStep:
    """Compile a graph that trains.

    Raises:
        BudgetTooSmall: the replayed peak stays over the budget, or no plan is expected to fit.
        RematError: the graph cannot be planned.
    """
    return _Compiler(graph, inputs, options, ledger).compile()


class _Compiler:
    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: Options, ledger: Ledger
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        limit = max(_LEAST_PLANNING, _PLANNING * len(graph.graph.nodes))
        options = dataclasses.replace(options, time_limit=min(options.time_limit, limit))
        self.options = options
        self.ledger = ledger
        self.device = main_device(item for item in inputs if isinstance(item, torch.Tensor))
        self.untouched = (
            options.memory_budget is None and options.plan is None and options.solver == "auto"
        )
        self.key = self._key()
        # What a device has, or has free, says nothing about that of the next process.
        self.store = None if options.budget.needs_device else PlanStore()

    def compile(self) -> InductorStep:
        known = self.store.load(self.key) if self.store is not None else None
        if known is not None:
            step = self._from_store(known)
            if step is not None:
                return step
        step, salt = self._search()
        if self.store is not None:
            self.store.save(self.key, StoredPlan(step.plan, salt))
        return step

    def _from_store(self, known: StoredPlan) -> InductorStep | None:
        """The step as compiled before, or for the same schedule; None if it does not fit."""
        stored = dataclasses.replace(known.plan, memory_budget=None, replayed_peak=None)
        options = dataclasses.replace(
            self.options, memory_budget=None, solver="auto", every_n_layers=None, plan=stored
        )
        try:
            made, plan = self._compile(options, known.salt)
        except PlanMismatch:
            return None
        if plan is None:
            return InductorStep(made.run, known.plan)
        plan = dataclasses.replace(
            plan, memory_budget=known.plan.memory_budget, solution=known.plan.solution
        )
        plan = self._replayed(made, plan)
        over = plan.memory_budget is not None and plan.peak > plan.memory_budget
        return None if over else InductorStep(made.run, plan)

    def _search(self) -> tuple[InductorStep, str]:
        """Compile, and again for less, until the replayed peak is within the budget."""
        options, budget = self.options, None
        tried: list[tuple[InductorStep, str]] = []
        for _ in range(1 + TIGHTENED):
            salt = secrets.token_hex(8)
            try:
                made, plan = self._compile(options, salt)
            except BudgetTooSmall as error:
                # So says an estimate: the plan with the least peak decides.
                budget = error.memory_budget if budget is None else budget
                if options.solver != "auto":
                    if tried:
                        break
                    raise
                options = dataclasses.replace(options, memory_budget=0.0)
                continue
            assert plan is not None  # the salt is new: nothing compiled for it is in a cache
            plan = self._replayed(made, plan)
            budget = plan.memory_budget if budget is None else budget
            step = InductorStep(made.run, dataclasses.replace(plan, memory_budget=budget))
            tried.append((step, salt))
            if budget is None or plan.peak <= budget:
                return tried[-1]
            if options.memory_budget == 0.0:
                break
            options = self._tightened(options, plan, budget)
        return self._best(tried, budget)

    def _tightened(self, options: Options, plan: Plan, budget: int) -> Options:
        """Options that ask for as much less as the replayed peak was over the budget."""
        target = plan.solution.memory_budget
        target = min(plan.predicted, plan.predicted if target is None else target)
        lower = target - (plan.peak - budget)
        if plan.least_peak is not None and lower <= plan.least_peak:
            return dataclasses.replace(options, memory_budget=0.0)
        if lower <= self.ledger.total:
            return dataclasses.replace(options, memory_budget=0.0)
        return dataclasses.replace(options, memory_budget=lower)

    def _best(
        self, tried: list[tuple[InductorStep, str]], budget: int | None
    ) -> tuple[InductorStep, str]:
        """The lowest peak, where the budget is a share of what is possible; else an error."""
        step, salt = min(tried, key=lambda pair: pair[0].plan.peak)
        assert budget is not None
        if self.options.budget.kind != "fraction":
            raise _over_budget(step.plan, budget, len(tried))
        note = (
            f"a fraction of {self.options.memory_budget} was expected to be "
            f"{format_bytes(budget)}; the least peak inductor's code was brought to is "
            f"{format_bytes(step.plan.peak)}"
        )
        plan = dataclasses.replace(
            step.plan, memory_budget=step.plan.peak, notes=(*step.plan.notes, note)
        )
        return InductorStep(step.run, plan), salt

    def _compile(self, options: Options, salt: str) -> tuple[inductor.InductorGraph, Plan | None]:
        plans: list[Plan] = []
        ledger = dataclasses.replace(self.ledger, donates=self.untouched)

        def split(
            joint: fx.GraphModule, joint_inputs: Any, **torch_options: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            parts = partition(joint, joint_inputs, options, ledger, **torch_options)
            plans.append(parts.plan)
            return parts.forward, parts.backward

        made = inductor.compile_graph(
            self.graph,
            self.inputs,
            partition=split,
            key=f"{self.key} {salt}",
            inductor_options={
                **self._own_options(),
                **(self.options.inductor or {}),
            },
            donate=self.untouched,
            hold_apart=not self.untouched,
        )
        return made, plans[0] if plans else None

    def _own_options(self) -> dict[str, Any]:
        if self.untouched:
            return {}
        as_planned = inductor.AS_PLANNED if self.device.type == "cpu" else {}
        offloads = self.options.offload or (self.options.plan and self.options.plan.offload)
        in_order = inductor.IN_ORDER if offloads else {}
        return {**inductor.FREE_EARLY, **as_planned, **in_order}

    def _replayed(self, made: inductor.InductorGraph, plan: Plan) -> Plan:
        assert made.forward is not None
        assert made.backward is not None
        granularity = find_device(self.device).granularity
        workspaces = MeasuredWorkspaces(Profiler(self.device, granularity))
        replay = replay_step(
            made.forward,
            made.backward,
            resident=self.ledger.total,
            granularity=granularity,
            device_type=self.device.type,
            workspace=workspaces,
        )
        return dataclasses.replace(plan, replayed_peak=replay.peak)

    def _key(self) -> str:
        """All that the plan and the code depend on."""
        options = self.options
        plan = options.plan
        said = [
            f"remat {__version__}",
            *environment(self.device),
            _describe(self.graph, self.inputs),
            f"budget {options.memory_budget!r} solver {options.solver} {options.every_n_layers}",
            f"limit {options.time_limit} gap {options.gap} cost {options.cost}",
            f"keep {options.keep} recompute {options.recompute} device {options.device}",
            f"inductor {sorted((options.inductor or {}).items(), key=str)}",
            f"resident {self.ledger.resident} other {self.ledger.other_graphs}",
            f"offload {offloading(options, find_device(options.device or self.device))}",
            "" if plan is None else hashlib.sha256(str(plan.to_json()).encode()).hexdigest(),
        ]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _describe(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The graph and its inputs, without the names its nodes happen to have."""
    place = {node: f"%{index}" for index, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in graph.graph.nodes:
        args = pytree.tree_map_only(
            fx.Node, lambda source: _Place(place[source]), (node.args, node.kwargs)
        )
        called = "" if node.op == "placeholder" else f"{_name(node.target)} {args}"
        lines.append(f"{node.op} {called}")
    for item in inputs:
        if isinstance(item, torch.Tensor):
            layout = (item.dtype, tuple(item.shape), tuple(item.stride()), item.device)
            lines.append(f"{layout} {item.requires_grad}")
        else:
            lines.append(repr(item))
    return "\n".join(lines)


def _name(target: Any) -> str:
    """A name that is the same in every process; a function prints with its address."""
    if isinstance(target, str) or not hasattr(target, "__name__"):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{target.__name__}"


@dataclass(frozen=True)
class _Place:
    """Stands for a node where arguments are printed."""

    name: str

    def __repr__(self) -> str:
        return self.name


def _over_budget(plan: Plan, budget: int, times: int) -> BudgetTooSmall:
    return BudgetTooSmall(
        f"memory_budget is {format_bytes(budget)} ({budget} bytes), but the least peak inductor's "
        f"code was brought to, in {times} compilations, is {format_bytes(plan.peak)} "
        f"({plan.peak} bytes; {plan.predicted} bytes were expected). Give that much, or a "
        'smaller batch; executor="eager" follows its plan to the byte',
        memory_budget=budget,
        least_peak=plan.peak,
        peak_lower_bound=plan.solution.peak_lower_bound,
    )
