"""torch's ways to save activations under torch.compile, and remat at each one's peak.

Every row runs in one process with stock inductor beside it: seconds are ratios to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import remat
from benchmarks import peers
from benchmarks.flops import GraphFlops
from benchmarks.inductor_cells import (
    Run,
    Stock,
    measure_run,
    run_stock,
    stock_inductor,
    time_ratios,
    watched,
)
from benchmarks.methods import methods
from remat.measurement import measure
from remat.plans import Plan
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.units import MIB
from tests.models.compare import inexact
from tests.models.steps import Outcome, TrainingStep, resident, run_step
from tests.models.zoo import STEPS

MODELS: Final[dict[str, Callable[[], TrainingStep]]] = {
    "gpt2_12": peers.gpt2,
    "llama": STEPS["llama"],
    "gpt2": STEPS["gpt2"],
}
BUDGETS_MIB: Final = {"gpt2_12": (85.0, 75.0, 65.0)}
ACTIVATION_BUDGETS: Final = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
CHECKPOINT: Final = "checkpoint every layer"
NOISE: Final = 0.05
"""How much slower a ratio of CPU seconds may be before it says anything."""


@dataclass(frozen=True)
class PeerRow:
    """One method; bytes above the resident ones, times over stock inductor's in the same process.

    Attributes:
        peer: name of the stock method, or of the budget where remat stands alone.
        peak, time: the peer's; None where remat stands alone.
        budget: what remat was given above the resident bytes; None stands for the fraction 0.0.
        ours, ours_time: remat's, None where it refused.
        predicted, replayed: of remat's plan.
        note: what was wrong, or why there is no plan.
    """

    model: str
    peer: str
    peak: int | None
    time: float | None
    budget: int | None
    ours: int | None
    ours_time: float | None
    predicted: int | None
    replayed: int | None
    compilations: int
    note: str


def peer_run(name: str, step: TrainingStep) -> Run:
    """What to call for one of torch's methods; switches the model of ``step`` over in place."""
    if name != CHECKPOINT:
        return stock_inductor(step.model, float(name))
    method = next(m for m in methods(inductor=False) if m.name == CHECKPOINT)
    return stock_inductor(method.prepare(step.model, GraphFlops()))


def peer_names() -> list[str]:
    """The methods compared with."""
    return [*map(str, ACTIVATION_BUDGETS), CHECKPOINT]


def compare_with(
    model: str, name: str, stock: Stock, repetitions: int, **options: object
) -> PeerRow:
    """One peer, and remat at its peak, interleaved with stock inductor."""
    step = stock.step if name == "1.0" else MODELS[model]()
    run = stock.run if name == "1.0" else peer_run(name, step)
    run_step(run, step)
    peak = measure_run(run, step).graph
    return run_ours(model, name, peak, stock, repetitions, beside=(run, step, peak), **options)


def run_ours(
    model: str,
    name: str,
    budget: int | None,
    stock: Stock,
    repetitions: int,
    *,
    beside: tuple[Run, TrainingStep, int] | None = None,
    **options: object,
) -> PeerRow:
    """remat within ``budget`` bytes above the resident ones; None: as little as it can."""
    step = MODELS[model]()
    inside = measure(lambda: None, resident=resident(step), warmup=0).resident
    asked: float | int = 0.0 if budget is None else inside + budget
    runs, steps = [stock.run], [stock.step]
    if beside is not None:
        runs, steps = [*runs, beside[0]], [*steps, beside[1]]
    note, plan, measured = "", None, None
    with watched() as seen:
        run = remat.compile(step.model, memory_budget=asked, executor="inductor", **options)
        try:
            outcome = run_step(run, step)
        except BudgetTooSmall as error:
            note = f"refused; least {(error.least_peak - inside) / MIB:.1f} MiB"
    if not note:
        (plan,) = run.plans
        assert isinstance(plan, Plan)
        measured = measure_run(run, step).graph
        note = _numbers(outcome, stock)
        runs, steps = [*runs, run], [*steps, step]
    ratios = time_ratios(runs, steps, repetitions) if repetitions else [1.0] * len(runs)
    return PeerRow(
        model=model, peer=name,
        peak=None if beside is None else beside[2],
        time=None if beside is None else ratios[1],
        budget=budget, ours=measured, ours_time=None if measured is None else ratios[-1],
        predicted=None if plan is None else plan.predicted - inside,
        replayed=None if plan is None else plan.peak - inside,
        compilations=seen.compilations, note=note,
    )  # fmt: skip


def _numbers(outcome: Outcome, stock: Stock) -> str:
    further = inexact(outcome, stock.outcome, stock.exact)
    return f"{len(further)} tensors further off than stock" if further else ""


def stock_of(model: str) -> Stock:
    """Stock inductor on a model, what all is compared with."""
    return run_stock(MODELS[model]())


def problems(row: PeerRow) -> list[str]:
    """What the comparison shows to be wrong."""
    found = [row.note] if row.note else []
    if row.ours is not None and row.budget is not None and row.ours > row.budget:
        found.append(f"{row.ours - row.budget} bytes over the budget")
    if row.time is not None and row.ours_time is not None and row.ours_time > row.time + NOISE:
        found.append(f"slower than {row.peer} at its peak")
    return found


def table(rows: list[PeerRow]) -> list[str]:
    """Markdown, one line a row."""
    lines = [
        "| model | peer | its peak MiB | its time | remat's budget MiB | estimated | replayed "
        "| measured | time | compiled | remarks |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = [
            row.model, row.peer, _mib(row.peak), _ratio(row.time),
            "0.0" if row.budget is None else _mib(row.budget), _mib(row.predicted),
            _mib(row.replayed), _mib(row.ours), _ratio(row.ours_time), str(row.compilations),
            "; ".join(problems(row)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mib(size: int | None) -> str:
    return "–" if size is None else f"{size / MIB:.2f}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
