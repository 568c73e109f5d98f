"""``remat demo``: the same training twice, the second time under a memory budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from remat.cli._step import read_budget
from remat.cli._terminal import is_terminal, print_report
from remat.solvers.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from remat.cli._training import Training
    from remat.plans import Plan

NAME: Final = "demo"
HELP: Final = "train a small model twice: plainly, then with half the activation memory"

CHART_WIDTH: Final = 64
CHART_HEIGHT: Final = 10
_MODELS: Final = ("tiny", "small", "gpt2", "llama")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, how many steps, and the budget."""
    parser.add_argument(
        "--model",
        choices=_MODELS,
        default="tiny",
        help='what to train (default "tiny", under two minutes; "gpt2" has GPT-2\'s real size)',
    )
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        type=read_budget,
        help='"64MiB", "auto", or a fraction like 0.0 for the least peak there is; by default what '
        "is resident and half of what the plain step adds to it",
    )
    parser.add_argument("--steps", type=int, default=24, help="training steps (default 24)")


def run(arguments: argparse.Namespace) -> int:
    """Train twice, compare; 1 if the budget was broken or a number changed."""
    import remat
    from remat.cli._training import PRESETS, python_sources, train
    from remat.options import Options
    from remat.solvers.errors import RematError

    if arguments.memory_budget is not None:
        Options.make(memory_budget=arguments.memory_budget)  # known before anything is trained
    preset, text = PRESETS[arguments.model], python_sources()
    print_report(f"model  {preset}")
    print_report(f"text   {format_bytes(len(text))} of Python's standard library\n")
    compiled: list[Any] = []

    def compiler(budget: object) -> Callable[..., Any]:
        def compile_model(model: Any, optimizer: Any) -> Any:
            options = dict(memory_budget=budget, executor="eager", optimizer=optimizer)
            compiled.append(remat.compile(model, **options))
            return compiled[-1]

        return compile_model

    with _progress(2 * arguments.steps) as bar:
        bar.describe("without a budget")
        plain = train(preset, text, arguments.steps, compiler(None), bar.tick)
        budget = arguments.memory_budget
        if budget is None:
            budget = _half(plain)
        bar.describe("within the budget")
        frugal = train(preset, text, arguments.steps, compiler(budget), bar.tick)
    plans = compiled[-1].plans
    if len(plans) != 1:
        raise RematError(f"the step was captured as {len(plans)} graphs; the demo expects one")
    return _report(plain, frugal, plans[0])


def _half(plain: Training) -> int:
    """What is resident, and half of what the plain step adds to it, in bytes."""
    resident = plain.measurement.resident if plain.measurement else 0
    return resident + (plain.peak - resident) // 2


def _report(plain: Training, frugal: Training, plan: Plan) -> int:
    from remat.cli._training import same_numbers

    curves = [[float(loss) for loss in run.losses] for run in (plain, frugal)]
    same = same_numbers(plain, frugal)
    budget = plan.memory_budget
    held = budget is None or frugal.peak <= budget
    lines = [*loss_chart(curves[0], curves[1]), "", *str(plan).splitlines(), ""]
    lines += comparison(plain, frugal, plan)
    lines += [
        f"{what} {'identical bit for bit' if yes else 'DIFFER'}" for what, yes in same.items()
    ]
    lines.append("")
    lines.append(_verdict(frugal.peak, budget, held))
    print_report("\n".join(lines))
    return 0 if held and all(same.values()) else 1


def comparison(plain: Training, frugal: Training, plan: Plan) -> list[str]:
    """Predicted and measured, without the budget and with it."""
    change = frugal.step_seconds / plain.step_seconds - 1
    rows = [
        ("", "no budget", "budget", "change"),
        (
            "peak, predicted",
            format_bytes(plan.baseline_peak),
            format_bytes(plan.peak),
            format_share(plan.peak / plan.baseline_peak - 1),
        ),
        (
            "peak, measured",
            format_bytes(plain.peak),
            format_bytes(frugal.peak),
            format_share(frugal.peak / plain.peak - 1),
        ),
        ("time, predicted", "", "", format_share(plan.extra_time)),
        (
            "time of a step, measured",
            format_seconds(plain.step_seconds),
            format_seconds(frugal.step_seconds),
            format_share(change),
        ),
    ]
    return [f"{a:<26}{b:>14}{c:>14}{d:>14}".rstrip() for a, b, c, d in rows]


def _verdict(peak: int, budget: int | None, held: bool) -> str:
    if budget is None:
        return "no budget was asked for"
    said = "held" if held else "BROKEN"
    return f"budget {said}: {format_bytes(budget)} asked for, {format_bytes(peak)} measured"


def loss_chart(plain: Sequence[float], frugal: Sequence[float]) -> list[str]:
    """Both curves over the steps: ``o`` without a budget, ``x`` with it, ``*`` where they meet."""
    top, bottom = max(*plain, *frugal), min(*plain, *frugal)
    width = min(CHART_WIDTH, len(plain))
    grid = [[" "] * width for _ in range(CHART_HEIGHT)]
    for losses, mark in ((plain, "o"), (frugal, "x")):
        for column in range(width):
            loss = losses[column * (len(losses) - 1) // max(1, width - 1)]
            drop = (top - loss) / (top - bottom) if top > bottom else 0.0
            row = grid[round(drop * (CHART_HEIGHT - 1))]
            row[column] = mark if row[column] == " " else "*"
    labels = [f"{top:.2f}", *[""] * (CHART_HEIGHT - 2), f"{bottom:.2f}"]
    lines = [f"{label:>6} |{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    legend = "loss over the steps: o no budget, x within the budget, * both"
    return [legend, *(line.rstrip() for line in lines), " " * 7 + "+" + "-" * width]


class _Bar:
    """A progress bar on a terminal's stderr; nothing elsewhere."""

    def __init__(self, progress: Any, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total) if progress is not None else None

    def describe(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def tick(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)


@contextmanager
def _progress(total: int) -> Iterator[_Bar]:
    if not is_terminal(sys.stderr):
        yield _Bar(None, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, total)
