"""One joint graph in, forward, backward and their plan out: ``partition``, stateless.

Whoever wants another frontend calls this function directly. What must be remembered from call to
call is the session's; it comes in as a ledger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.budget import machine_memory
from remat.cache import KnownPlans, known_plans
from remat.cost.device import DeviceSpec, find_device
from remat.cost.link import offloading
from remat.cost.model import CostModel
from remat.decided import Decided
from remat.lowering import Lowering, lower_for_eager, lower_for_inductor, planned_for
from remat.options import Options
from remat.passes.apart import hold_products
from remat.passes.baseline import baseline_schedule
from remat.passes.joint import JointGraph
from remat.passes.lower import Lowered
from remat.passes.mutation import pin_mutated_reads, reads_overwritten
from remat.passes.offload import Place
from remat.passes.regions import inline_regions
from remat.passes.split import split
from remat.passes.storages import main_device, tensors_of
from remat.passes.torch_private import partition as private
from remat.passes.verify import verify_joint, verify_split
from remat.plans import Plan
from remat.pooled import copied_bytes, in_pool, recording_notes
from remat.report.text import budget_too_small
from remat.solvers.choose import least_peak, solve
from remat.solvers.cold import await_kernels
from remat.solvers.errors import BudgetTooSmall, PlanMismatch
from remat.solvers.every_n_layers import repeated_blocks
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution, Timeline
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure
from remat.solvers.units import format_bytes
from remat.version import __version__


@dataclass(frozen=True)
class Ledger:
    """What is alive beside this graph, in bytes.

    Attributes:
        resident: parameters, buffers, inputs, gradients and optimizer state at entry.
        other_graphs: what other graphs of the step keep alive meanwhile.
        device_exists: whether ops may be run to measure them; ``remat.plan`` runs nothing.
        donates: under inductor, backward may write over what forward saved.
        one_of_several: a pattern of modules may mean one of another graph.
    """

    resident: int = 0
    other_graphs: int = 0
    device_exists: bool = True
    donates: bool = False
    one_of_several: bool = False

    @property
    def total(self) -> int:
        """All of it."""
        return self.resident + self.other_graphs


@dataclass(frozen=True)
class Partition:
    """Two graphs, and the plan they follow."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan


def partition(
    module: fx.GraphModule,
    joint_inputs: Any,
    options: Options,
    ledger: Ledger,
    *,
    num_fwd_outputs: int,
    **torch_options: Any,
) -> Partition:
    """Plan a joint graph within ``options.memory_budget`` and split it accordingly.

    Where the baseline meets the budget, torch's own two graphs are handed over untouched, unless
    their backward reads an input that forward has overwritten by then, or (where no wrapper tells
    the peak) they keep states of generators, which the baseline does not count.

    Args:
        module: the joint graph, as AOTAutograd hands it to a ``partition_fn``.
        torch_options: further keyword arguments AOTAutograd passes to a partition.

    Raises:
        BudgetTooSmall: no plan fits.
        CaptureError: the graph has something this version cannot plan.
        PlanMismatch: ``options.plan`` belongs to another graph.
    """
    regions = inline_regions(module)
    if options.executor == "inductor":
        private.merge_common(module)
    joint = JointGraph.make(module, num_fwd_outputs)
    verify_joint(joint, "inline_regions" if regions else "capture")
    private.check_marked(joint.nodes, joint.output)
    graph_hash = joint.hash
    joint = pin_mutated_reads(joint)
    verify_joint(joint, "pin_mutated_reads")
    device = main_device(tensor for node in joint.nodes for tensor in tensors_of(node))
    spec = find_device(options.device or device)
    made = _lower(joint, joint_inputs, spec, device, options, ledger, torch_options)
    notes = _notes(made, regions, spec, device)
    if options.executor == "cudagraph":
        notes += recording_notes(module, device.type)
    own = made.own
    lowered, plan = make_plan(
        made.lowered,
        lambda decided: baseline_schedule(decided, *own),
        options,
        spec,
        graph_hash=graph_hash,
        notes=notes,
        one_of_several=ledger.one_of_several,
        static=copied_bytes(joint, spec.granularity, torch_options),
    )
    schedule = plan.solution.schedule
    place = None if plan.offload is None else Place(plan.offload, options.executor != "inductor")
    wrong = reads_overwritten(joint, own[1])
    wrong |= options.executor != "inductor" and private.saves_generators(own[0])
    if schedule == plan.baseline and not (plan.keep or plan.recompute) and not wrong:
        return Partition(*own, plan)
    forward, backward = split(lowered, schedule, place)
    verify_split(lowered, schedule, forward, backward)
    if options.executor == "inductor":
        hold_products(backward.graph)
        backward.recompile()
    return Partition(forward, backward, plan)


def make_plan(
    undecided: Lowered,
    unasked: Callable[[Lowered], Schedule],
    options: Options,
    spec: DeviceSpec,
    *,
    graph_hash: str,
    notes: tuple[str, ...] = (),
    one_of_several: bool = False,
    static: int = 0,
) -> tuple[Lowered, Plan]:
    """Plan a lowered graph: the problem with the user's decisions in it, and what was decided.

    Args:
        undecided: without the user's decisions.
        unasked: what the executor does unasked, for the lowered graph with those decisions.
        one_of_several: a pattern of modules may mean one of another graph.
        static: of a recorded graph, bytes of copies of its inputs and outputs.

    Raises:
        BudgetTooSmall: no plan fits.
        PlanMismatch: ``options.plan`` belongs to another graph.
    """
    decided = Decided.of(options)
    if one_of_several:
        decided = decided.known_in(undecided.problem)
        options, said = _without_layers(undecided.problem, options)
        notes = (*notes, *said)
    lowered = dataclasses.replace(undecided, problem=decided.constrain(undecided.problem))
    baseline = unasked(lowered)
    offload = offloading(options, spec)
    link = None if offload is None else offload.link
    notes = (*notes, *(offload.notes if offload is not None else ()))

    def choose(options: Options) -> _Choice:
        return _choose(lowered, undecided.problem, baseline, options, graph_hash, spec, link)

    chosen, replayed = choose(options), None
    if options.executor == "cudagraph":
        chosen, replayed = _in_pool(lowered.problem, chosen, choose, options, static)
    plan = Plan(
        remat_version=__version__,
        torch_version=torch.__version__,
        device=spec.name,
        executor=str(options.executor),
        graph_hash=graph_hash,
        memory_budget=chosen.memory_budget,
        problem=lowered.problem,
        solution=chosen.solution,
        baseline=baseline,
        least_peak=chosen.least_peak,
        notes=(*notes, *decided.notes(undecided.problem)),
        replayed_peak=replayed,
        link=link,
        offload=None if offload is None else offload.where,
        **dataclasses.asdict(decided),
    )
    return lowered, plan


def _lower(
    joint: JointGraph,
    joint_inputs: Any,
    spec: DeviceSpec,
    device: torch.device,
    options: Options,
    ledger: Ledger,
    torch_options: Mapping[str, Any],
) -> Lowering:
    here = ledger.device_exists and spec.torch_device is not None
    mode = options.cost or ("measured" if here else "roofline")
    model = CostModel(spec, mode, run=ledger.device_exists)
    given = (joint, joint_inputs, spec, device, model, ledger.total, torch_options)
    if options.executor == "inductor":
        return lower_for_inductor(*given, donated=ledger.donates, keep=options.keep)
    return lower_for_eager(*given, replays_random=options.executor != "cudagraph")


def _without_layers(problem: Problem, options: Options) -> tuple[Options, tuple[str, ...]]:
    """Options for a graph whose model has repeated layers elsewhere, and what to say of it."""
    layers = (problem.ops[index].layer for index in problem.forward)
    if options.solver != "every_n_layers" or repeated_blocks(layers):
        return options, ()
    note = "no layers repeat in this graph, so every_n_layers leaves it as it is"
    return dataclasses.replace(options, solver="auto", every_n_layers=None), (note,)


def _in_pool(
    problem: Problem,
    chosen: _Choice,
    choose: Callable[[Options], _Choice],
    options: Options,
    static: int,
) -> tuple[_Choice, int]:
    def solve(budget: int) -> Solution:
        return choose(dataclasses.replace(options, memory_budget=budget)).solution

    solution, peak, budget = in_pool(
        problem,
        chosen.solution,
        chosen.memory_budget if options.plan is None else None,
        solve,
        static=static,
        is_fraction=options.budget.kind == "fraction",
    )
    return dataclasses.replace(chosen, solution=solution, memory_budget=budget), peak


@dataclass(frozen=True)
class _Choice:
    solution: Solution
    memory_budget: int | None
    least_peak: int | None = None


def _choose(
    lowered: Lowered,
    undecided: Problem,
    baseline: Schedule,
    options: Options,
    graph_hash: str,
    spec: DeviceSpec,
    link: Link | None,
) -> _Choice:
    problem = lowered.problem
    if options.plan is not None:
        return _replay(problem, options, graph_hash, link)
    known = known_plans(problem, link)
    timeline = simulate(problem.unrestricted, baseline)
    total, free = _memory(spec, problem) if options.budget.needs_device else (None, None)
    budget = options.budget.resolve(
        baseline_peak=timeline.peak,
        least_peak=lambda: _least_peak(problem, known, options, link),
        device_total=total,
        device_free=free,
    )
    least = None if known.least is None else simulate(problem, known.least, link).peak
    # A solver that was asked for by name is asked even where the baseline would do.
    baseline_would_do = options.solver == "auto" and not Decided.of(options)
    if budget is None and baseline_would_do:
        return _Choice(untouched(problem, baseline, timeline, None), None, least)
    if budget is not None and timeline.peak <= budget and baseline_would_do:
        return _Choice(untouched(problem, baseline, timeline, budget), budget, least)
    solution = _solve(problem, known, options, budget, link)
    if not solution.fits:
        assert budget is not None
        error = budget_too_small(problem, solution, budget)
        raise Decided.of(options).explain(error, undecided, options)
    if budget is not None and options.solver != solution.solver == "auto":
        raise BudgetTooSmall(
            f"solver {options.solver!r} has no plan within memory_budget {format_bytes(budget)} "
            f'({budget} bytes); solver="auto" has one that peaks at {format_bytes(solution.peak)}',
            memory_budget=budget,
            least_peak=solution.peak,
            peak_lower_bound=solution.peak_lower_bound,
        )
    return _Choice(solution, budget, least)


def _memory(spec: DeviceSpec, problem: Problem) -> tuple[int, int]:
    """(all, what this step may take) of the device's bytes: what is free and what it holds there.

    A device that is only described has its whole memory free.
    """
    if spec.torch_device is None:
        return spec.memory, spec.memory
    total, free = machine_memory(spec.torch_device)
    return total, free + problem.fixed_bytes


def _least_peak(problem: Problem, known: KnownPlans, options: Options, link: Link | None) -> int:
    if known.least is None:
        await_kernels()
        known.least = least_peak(
            problem, time_limit=options.time_limit, progress=options.progress, link=link
        ).schedule
        known.remember(known.least)
    return simulate(problem, known.least, link).peak


def _solve(
    problem: Problem,
    known: KnownPlans,
    options: Options,
    budget: int | None,
    link: Link | None,
) -> Solution:
    starts: tuple[Schedule, ...] = ()
    if options.solver == "auto":
        unlinked = () if link is None else known_plans(problem).schedules
        starts = (*known.schedules, *unlinked)
    await_kernels()
    solution = solve(
        problem,
        memory_budget=budget,
        solver=options.solver,
        time_limit=options.time_limit,
        gap=options.gap,
        every_n_layers=options.every_n_layers or 1,
        link=link,
        starts=starts,
        progress=options.progress,
    )
    known.remember(solution.schedule)
    if known.least is not None and solution.peak < simulate(problem, known.least, link).peak:
        known.least = solution.schedule
    return solution


def untouched(
    problem: Problem, baseline: Schedule, timeline: Timeline, budget: int | None
) -> Solution:
    """The baseline as a solution."""
    required = Structure(problem).required_seconds
    # Where the user checkpoints, the baseline computes again, and a plan without that is faster.
    fastest = timeline.seconds <= required * (1 + 1e-9)
    return Solution(
        problem_key=problem.key,
        schedule=baseline,
        timeline=timeline,
        memory_budget=budget,
        status="optimal" if fastest else "feasible",
        lower_bound=min(timeline.seconds, required),
        peak_lower_bound=problem.fixed_bytes,
        floor_op=-1,
        solver="baseline",
    )


def _replay(problem: Problem, options: Options, graph_hash: str, link: Link | None) -> _Choice:
    """The stored schedule, priced anew: the resident bytes and this device's costs may differ."""
    plan = options.plan
    assert plan is not None
    if plan.executor != options.executor:
        raise PlanMismatch(
            f"the plan was made for the {plan.executor} executor, this is the {options.executor} "
            "one, which uses memory otherwise; plan again with remat.plan"
        )
    plan.check(graph_hash, torch.__version__)
    ours, theirs = (
        (
            [(op.phase, op.reads, op.writes, op.rerunnable) for op in p.ops],
            [(value.owned, value.tangent, value.output, value.keepable) for value in p.values],
        )
        for p in (problem, plan.problem)
    )
    if ours != theirs:
        raise PlanMismatch(
            "the plan's steps do not fit this graph: it was written by another version of remat "
            f"({plan.remat_version}, this is {__version__}); plan again with remat.plan"
        )
    timeline = simulate(problem, plan.solution.schedule, link)
    if plan.memory_budget is not None and timeline.peak > plan.memory_budget:
        raise BudgetTooSmall(
            f"the stored plan peaks at {format_bytes(timeline.peak)} here, above its budget of "
            f"{format_bytes(plan.memory_budget)}: more is resident now, or this device's kernels "
            "need other workspaces than were assumed; plan again with memory_budget=",
            memory_budget=plan.memory_budget,
            least_peak=timeline.peak,
            peak_lower_bound=plan.solution.peak_lower_bound,
        )
    # What was proven for the stored costs is not proven for those of today.
    solution = dataclasses.replace(
        plan.solution,
        problem_key=problem.key,
        timeline=timeline,
        status="feasible",
        lower_bound=min(timeline.seconds, Structure(problem).required_seconds),
    )
    return _Choice(solution, plan.memory_budget, plan.least_peak)


def _notes(made: Lowering, regions: int, spec: DeviceSpec, device: torch.device) -> tuple[str, ...]:
    assumed: dict[str, int] = {}
    for node, cost in made.costs.items():
        if cost.assumed:
            assumed[str(node.target)] = assumed.get(str(node.target), 0) + 1
    notes = list(made.lowered.kept)
    if regions:
        notes.insert(
            0,
            f"{regions} calls of nested_compile_region, forward and backward, are planned op by "
            "op, as if written in line",
        )
    if spec.torch_device is None:
        notes.append(planned_for(spec, device, made.lowered.problem))
    if assumed:
        listed = ", ".join(f"{target} ({count})" for target, count in sorted(assumed.items()))
        notes.append(f"workspace not measured, assumed to be none: {listed}")
    return tuple(notes)
