"""One model under one budget through inductor: the peak, the seconds and the gradients, compared
with stock inductor's in the same process.

Seconds are CPU seconds of the process on one thread, and always a ratio to a run in the same
process, repetitions interleaved: on a shared machine nothing else can be compared.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import remat
import remat.inductor as planned
from benchmarks.cells import measure_run
from remat.measurement import Measurement
from remat.plan_store import PlanStore
from remat.plans import Plan
from tests.models.compare import inexact
from tests.models.steps import (
    Losses,
    Outcome,
    TrainingStep,
    differences,
    restore,
    run_step,
    train_once,
)

REPLAY_TOLERANCE: Final = 0.01
Run = Callable[..., Losses]


@dataclass(frozen=True)
class InductorCell:
    """What came out of one model under one budget; sizes in bytes, times in seconds.

    Attributes:
        budget: as given; None is no budget. ``memory_budget``: in bytes.
        resident, predicted, replayed, measured: the peak's resident part; the peak as estimated
            before compilation, as replayed from the generated code, and the true one.
        stock: the true peak of stock inductor.
        compilations: how often the graph went through inductor.
        planning, compiling: seconds of the first call spent in planning, and in all.
        extra_time: predicted by the plan, over the baseline's.
        time_ratio: measured CPU seconds of a step over stock inductor's.
        error: distance of all gradients from the float64 ones over that of stock inductor's;
            0 where they equal stock's bit by bit; None where the step draws random numbers.
        problems: what was not as it should be; empty if all is well.
    """

    model: str
    budget: float | None
    memory_budget: int | None
    resident: int
    predicted: int
    replayed: int
    measured: int
    stock: int
    compilations: int
    planning: float
    compiling: float
    extra_time: float
    time_ratio: float
    error: float | None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Stock:
    """Stock inductor on one step; ``exact`` is None where the step draws random numbers."""

    step: TrainingStep
    run: Run
    outcome: Outcome
    exact: Outcome | None
    measured: Measurement


@dataclass
class Watched:
    """What remat did while it was watched."""

    compilations: int = 0
    partitions: int = 0
    planning: float = 0.0


def stock_inductor(model: nn.Module, activation_memory_budget: float = 1.0) -> Run:
    """torch.compile as it is, with this setting while it compiles.

    A backend of its own for each, or Dynamo would take the code that another setting compiled.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=activation_memory_budget):
            return compile_fx(graph, inputs)

    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def run_stock(step: TrainingStep) -> Stock:
    """Compile a step with stock inductor and keep what the others are compared with."""
    torch._dynamo.reset()
    run = stock_inductor(step.model)
    outcome = run_step(run, step)
    return Stock(step, run, outcome, exact_outcome(step), measure_run(run, step))


def run_cell(
    stock: Stock, budget: float | None, *, repetitions: int = 5, **options: Any
) -> InductorCell:
    """The model of ``stock`` under a budget; ``options`` go to ``remat.compile``."""
    step, begin = stock.step, time.perf_counter()
    with watched() as seen:
        run = remat.compile(step.model, memory_budget=budget, executor="inductor", **options)
        outcome = run_step(run, step)
    compiling = time.perf_counter() - begin
    measured = measure_run(run, step)
    (plan,) = run.plans  # that of the whole step by now, and a fraction is one of all of it
    assert isinstance(plan, Plan)
    ratio = time_ratios([stock.run, run], [step, step], repetitions)[1] if repetitions else 1.0
    return InductorCell(
        model=step.name, budget=budget, memory_budget=plan.memory_budget,
        resident=measured.resident, predicted=plan.predicted, replayed=plan.peak,
        measured=measured.peak, stock=stock.measured.peak, compilations=seen.compilations,
        planning=seen.planning, compiling=compiling, extra_time=plan.extra_time, time_ratio=ratio,
        error=relative_error(outcome, stock),
        problems=_problems(plan, measured, outcome, stock),
    )  # fmt: skip


def _problems(plan: Plan, measured: Measurement, outcome: Outcome, stock: Stock) -> list[str]:
    problems = []
    if plan.memory_budget is not None and measured.peak > plan.memory_budget:
        over = measured.peak - plan.memory_budget
        problems.append(f"the measured peak is {over} bytes over the budget")
    off = abs(plan.peak - measured.peak) / measured.peak
    if off > REPLAY_TOLERANCE:
        problems.append(f"the replayed peak is {100 * off:.1f} % off the measured one")
    if plan.memory_budget is None:
        if measured.peak != stock.measured.peak:
            problems.append(f"stock inductor's peak is {stock.measured.peak} bytes")
        problems += [f"{key} is not stock's" for key in differences(stock.outcome, outcome)]
        return problems
    further = inexact(outcome, stock.outcome, stock.exact)
    return problems + [f"{key} is further off than stock inductor may be" for key in further]


def relative_error(outcome: Outcome, stock: Stock) -> float | None:
    """See ``InductorCell.error``."""
    if not differences(stock.outcome, outcome):
        return 0.0
    if stock.exact is None:
        return None
    ours, theirs = (_distance(found, stock.exact) for found in (outcome, stock.outcome))
    return ours / theirs if theirs else float("inf")


def _distance(found: Outcome, exact: Outcome) -> float:
    names = [name for name in exact if name.startswith("gradient")]
    return sum(float((found[n].double() - exact[n]).square().sum()) for n in names) ** 0.5


class _InFloat64(TorchDispatchMode):
    """Casts to less than float64 that a model has inside (norms, rotary angles) stay in float64."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        less = (torch.float32, torch.bfloat16)
        args, kwargs = pytree.tree_map_only(
            torch.dtype, lambda t: torch.float64 if t in less else t, (args, kwargs or {})
        )
        return op(*args, **kwargs)


def exact_outcome(step: TrainingStep) -> Outcome | None:
    """The step run eagerly in float64; None if it draws random numbers."""
    args = tuple(a.double() if a.is_floating_point() else a for a in step.args)
    double = TrainingStep(step.name, copy.deepcopy(step.model).double(), args)
    with _InFloat64():
        outcome = run_step(double.model, double)
    torch.manual_seed(0)
    return outcome if torch.equal(outcome["rng"], torch.get_rng_state()) else None


def time_ratios(
    runs: Sequence[Run], steps: Sequence[TrainingStep], repetitions: int
) -> list[float]:
    """CPU seconds of each over those of the first: the median over interleaved repetitions."""
    seconds: list[list[float]] = [[] for _ in runs]
    for repetition, (index, run, step) in itertools.product(
        range(repetitions + 1), zip(itertools.count(), runs, steps, strict=False)
    ):
        begin = time.process_time()
        train_once(run, step)
        step.model.zero_grad(set_to_none=True)
        if repetition:  # the first warms the caches up
            seconds[index].append(time.process_time() - begin)
    for step in steps:
        restore(step, step.initial)
    return [
        statistics.median(own / first for own, first in zip(each, seconds[0], strict=True))
        for each in seconds
    ]


@contextmanager
def watched(*, stored_plans: bool = False) -> Iterator[Watched]:
    """Count compilations and partitions inside the block.

    Args:
        stored_plans: whether plans that an earlier run left on disk may be found.
    """
    seen = Watched()
    compile_graph, partition = planned.inductor.compile_graph, planned.partition

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.compilations += 1
        return compile_graph(*args, **kwargs)

    def timed(*args: Any, **kwargs: Any) -> Any:
        seen.partitions += 1
        begin = time.perf_counter()
        try:
            return partition(*args, **kwargs)
        finally:
            seen.planning += time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as folder:

        class Fresh(PlanStore):
            def __init__(self) -> None:
                self.folder = Path(folder)

        with (
            mock.patch.object(planned.inductor, "compile_graph", counted),
            mock.patch.object(planned, "partition", timed),
            mock.patch.object(planned, "PlanStore", PlanStore if stored_plans else Fresh),
        ):
            yield seen
