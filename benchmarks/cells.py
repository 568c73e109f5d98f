"""One cell of the matrix: a model under a memory budget, measured, and compared bit by bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule

import remat
import remat.compilation
from remat.measurement import Measurement, measure
from remat.plans import Plan
from remat.solvers.errors import BudgetTooSmall
from tests.models.steps import (
    Losses,
    Outcome,
    TrainingStep,
    differences,
    resident,
    restore,
    run_step,
    train_once,
)
from tests.models.zoo import STEPS

PREDICTION_TOLERANCE = 0.01
Run = Callable[..., Losses]


@dataclass(frozen=True)
class Cell:
    """What came out of one model under one budget; sizes in bytes, times in seconds.

    Attributes:
        budget: as given; None is no budget.
        resident, predicted, measured: the peak's resident part, the plan's peak, the true peak.
        baseline: predicted peak without remat.
        memory_budget: ``budget`` in bytes.
        seconds: predicted time of the step.
        extra_time, extra_flops, gap: of the plan.
        step_seconds: measured wall time of a step, watching included.
        wall: seconds the cell took, compilation and solving included.
        problems: what was not as it should be; empty if all is well.
    """

    model: str
    budget: float | None
    memory_budget: int | None
    resident: int
    baseline: int
    predicted: int
    measured: int
    seconds: float
    extra_time: float
    extra_flops: float
    gap: float
    step_seconds: float
    wall: float
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Baseline:
    """A model without a budget: its step, what the unrewritten graphs leave, the floor."""

    step: TrainingStep
    outcome: Outcome
    cell: Cell


def run_baseline(model: str, **options: Any) -> Baseline:
    """``memory_budget=None``: torch's own graphs, handed over untouched."""
    begin, step = time.perf_counter(), STEPS[model]()
    wanted, stock = _stock_graphs(step)
    torch._dynamo.reset()
    with _partitions() as ours:
        run = remat.compile(step.model, memory_budget=None, **options)
        outcome = run_step(run, step)
    problems = [f"{key} differs from torch's own partition" for key in differences(wanted, outcome)]
    if ours != stock:
        problems.append("the baseline's graphs were not handed over untouched")
    plan = _only_plan(run)
    if plan.solution.schedule != plan.baseline or plan.extra_time or plan.extra_flops:
        problems.append("the plan without a budget is not the baseline")
    cell = _cell(model, None, plan, measure_run(run, step), begin, problems)
    return Baseline(step, outcome, cell)


def run_cell(baseline: Baseline, budget: float, **options: Any) -> Cell:
    """The model of ``baseline`` under a budget, compared with it."""
    begin, step = time.perf_counter(), baseline.step
    torch._dynamo.reset()
    run = remat.compile(step.model, memory_budget=budget, **options)
    problems = [
        f"{key} differs from the unrewritten graph's"
        for key in differences(baseline.outcome, run_step(run, step))
    ]
    measured = measure_run(run, step)
    again = differences(baseline.outcome, run_step(run, step))
    problems += [f"{key} differs the second time" for key in again]
    return _cell(baseline.cell.model, budget, _only_plan(run), measured, begin, problems)


def refusal(baseline: Baseline, **options: Any) -> list[str]:
    """What is wrong with the answer to a budget of one byte under the proven floor."""
    step = baseline.step
    plan = remat.plan(step.model, step.args, memory_budget=0.0, **options)
    floor = plan.solution.peak_lower_bound
    torch._dynamo.reset()
    try:
        run_step(remat.compile(step.model, memory_budget=floor - 1, **options), step)
    except BudgetTooSmall as error:
        return _missing_from(error, floor)
    finally:
        restore(step, step.initial)
    return [f"a budget of {floor - 1} bytes, one under the proven floor, was accepted"]


def _missing_from(error: BudgetTooSmall, floor: int) -> list[str]:
    message, problems = str(error), []
    if error.memory_budget != floor - 1 or error.least_peak < error.peak_lower_bound:
        problems.append(f"the refusal's figures make no sense: {vars(error)}")
    for what, text in (
        ("the least peak", str(error.least_peak)),
        ("the proven bound", str(error.peak_lower_bound)),
        ("the op", "aten."),
        ("the layer", " in "),
        ("help", "What would help"),
    ):
        if text not in message:
            problems.append(f"the refusal does not name {what}: {message}")
    return problems


def monotone(cells: list[Cell]) -> list[str]:
    """Cells of one model where a larger budget predicts a longer time or a lower peak."""
    ordered = sorted(cells, key=lambda cell: 2.0 if cell.budget is None else cell.budget)
    problems = []
    for less, more in itertools.pairwise(ordered):
        if more.seconds > less.seconds:
            problems.append(f"budget {more.budget} is predicted slower than {less.budget}")
        if more.predicted < less.predicted:
            problems.append(f"budget {more.budget} is predicted to peak below {less.budget}")
    return problems


def measure_run(run: Run, step: TrainingStep) -> Measurement:
    """True peak of one step from the initial state, without gradients before it."""

    def once() -> object:
        losses = train_once(run, step)
        step.model.zero_grad(set_to_none=True)
        return losses

    restore(step, step.initial)
    measured = measure(once, resident=resident(step))
    restore(step, step.initial)
    return measured


def _cell(
    model: str,
    budget: float | None,
    plan: Plan,
    measured: Measurement,
    begin: float,
    problems: list[str],
) -> Cell:
    if plan.memory_budget is not None and measured.peak > plan.memory_budget:
        over = measured.peak - plan.memory_budget
        problems.append(f"the measured peak is {over} bytes over the budget")
    error = abs(plan.peak - measured.peak) / measured.peak
    if error > PREDICTION_TOLERANCE:
        problems.append(f"the predicted peak is {100 * error:.1f} % off the measured one")
    return Cell(
        model=model,
        budget=budget,
        memory_budget=plan.memory_budget,
        resident=measured.resident,
        baseline=plan.baseline_peak,
        predicted=plan.peak,
        measured=measured.peak,
        seconds=plan.solution.seconds,
        extra_time=plan.extra_time,
        extra_flops=plan.extra_flops,
        gap=plan.gap,
        step_seconds=measured.seconds,
        wall=time.perf_counter() - begin,
        problems=problems,
    )


def _only_plan(run: Any) -> Plan:
    plans = list(run.plans)
    if len(plans) != 1 or not isinstance(plans[0], Plan):
        raise AssertionError(f"one plan was expected, not {plans}")
    return plans[0]


@contextmanager
def _partitions() -> Iterator[list[str]]:
    """The code of both graphs of every partition that remat makes inside the block."""
    code: list[str] = []
    real = remat.compilation.partition

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        code.extend(graph.code for graph in (made.forward, made.backward))
        return made

    with mock.patch.object(remat.compilation, "partition", watched):
        yield code


def _stock_graphs(step: TrainingStep) -> tuple[Outcome, list[str]]:
    """The step under torch's own partition: what it leaves, and the code of both graphs."""
    code: list[str] = []

    def split(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        graphs = default_partition(*args, **kwargs)
        code.extend(graph.code for graph in graphs)
        return graphs

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)
    torch._dynamo.reset()
    run = torch.compile(step.model, backend=backend, fullgraph=True, dynamic=False)
    return run_step(run, step), code
