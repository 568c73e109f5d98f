"""Every way to run a plan on a CUDA device, against the usual ones: one table, in one go.

    python -m benchmarks.cuda_check --out results

needs ten minutes of one large GPU at most: rows come in the order of what they tell, each is
written to ``results/cuda_check.jsonl`` when it is done, and no row is begun that may not end in
time. Run again, it goes on where it stopped. ``--device cpu --tiny`` runs what a CPU can, in small.

Columns: the plan's peak; the measured one, allocated and reserved; tokens a second of forward and
backward (and update, for whole steps); and how far the gradients are from those of the plain model
run op by op (0: equal bit by bit; kernels with atomics differ from run to run).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import remat
from benchmarks import rows
from benchmarks.cuda_check_models import SHAPES, Batch, build, relative_error, tiny
from remat.solvers.units import format_bytes

GPT2, LLAMA = "gpt2-124m", "llama-1b"
_MODELS: Final = "benchmarks/cuda_check_models.py"
_TIMED_SECONDS: Final = 1.0
_SOLVE_SECONDS: Final = 3.0


@dataclass(frozen=True)
class Row:
    """One way to run one model.

    Attributes:
        method: see :data:`METHODS`.
        budget: of remat's, a fraction; of torch's ``activation_memory_budget``, its value.
        seconds: how long it may take, to know what still fits.
    """

    model: str
    method: str
    budget: float | None = None
    seconds: int = 25

    @property
    def key(self) -> str:
        """What it is found by in the file of results."""
        return f"{self.model} {self.method}" + ("" if self.budget is None else f" {self.budget}")

    @property
    def needs_cuda(self) -> bool:
        """Whether a CPU cannot run it."""
        return "cudagraph" in self.method or "offload" in self.method


def _rows() -> Iterator[Row]:
    """In the order of what they tell: first whether it runs at all and the peaks are right."""
    yield Row(GPT2, "plain", seconds=15)
    yield Row(GPT2, "remat eager", 0.5)
    yield Row(GPT2, "step cudagraph", 0.5, 30)
    yield Row(GPT2, "compile", seconds=40)
    yield Row(GPT2, "remat inductor", 0.5, 60)
    yield Row(GPT2, "remat cudagraph", 0.5, 30)
    yield Row(GPT2, "remat eager offload", 0.5, 30)
    yield Row(GPT2, "step cudagraph offload", 0.5, 35)
    yield Row(GPT2, "checkpoint", seconds=15)
    yield Row(GPT2, "stock budget", 0.5, 45)
    yield Row(GPT2, "step eager", 0.5, 20)
    for budget in (0.25, 0.0, 1.0):
        yield Row(GPT2, "remat eager", budget)
    yield Row(LLAMA, "plain", seconds=15)
    yield Row(LLAMA, "remat eager", 0.5, 35)
    yield Row(LLAMA, "checkpoint", seconds=15)
    yield Row(LLAMA, "step cudagraph", 0.25, 45)
    yield Row(LLAMA, "step cudagraph offload", 0.25, 50)
    yield Row(LLAMA, "compile", seconds=45)
    yield Row(LLAMA, "remat inductor", 0.25, 75)
    yield Row(GPT2, "remat inductor offload", 0.25, 60)
    yield Row(GPT2, "remat cudagraph trees", 0.5, 75)
    yield Row(LLAMA, "remat eager offload", 0.25, 35)
    yield Row(LLAMA, "stock budget", 0.25, 60)
    for budget in (0.25, 0.0, 1.0):
        yield Row(GPT2, "remat inductor", budget, 60)
        yield Row(GPT2, "stock budget", budget, 45)
        yield Row(GPT2, "remat cudagraph", budget, 30)
    yield Row(LLAMA, "remat eager", 0.25, 35)
    yield Row(LLAMA, "remat inductor", 0.5, 75)
    yield Row(LLAMA, "stock budget", 0.5, 60)
    yield Row(GPT2, "compiled checkpoint", seconds=45)


ROWS: Final = tuple(_rows())


@dataclass
class Result:
    """What came out; sizes in bytes. ``error`` is empty if all went well.

    Attributes:
        machine: device, versions and sizes of the models, see :func:`described_machine`; a row of
            another machine is no result of this one.
    """

    key: str
    machine: str = ""
    predicted: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    tokens_per_second: float | None = None
    gradient_error: float | None = None
    loss: float | None = None
    wall: float = 0.0
    error: str = ""


@dataclass
class Prepared:
    """A model and how to run one step of it.

    Attributes:
        step: forward, backward and, for whole steps, update; the loss.
        plan: the plan of the step, once it has run.
        recorded: the memory of the step is that of a recorded graph, there between steps too.
        updates: parameters change, and gradients are gone.
    """

    model: nn.Module
    batch: Batch
    step: Callable[[], Tensor]
    plan: Callable[[], Any] = lambda: None
    recorded: bool = False
    updates: bool = False


def prepare(row: Row, device: str, small: bool) -> Prepared:
    """The model of a row, compiled the row's way."""
    model, batch = build(row.model, device, small=small, checkpointed="checkpoint" in row.method)
    if row.method.startswith("step"):
        return _whole_step(model, batch, row)
    if not row.method.startswith("remat"):
        compiled = row.method in ("compile", "stock budget", "compiled checkpoint")
        run: Any = torch.compile(model, dynamic=False) if compiled else model
        return Prepared(model, batch, _training(run, model, batch))
    options: dict[str, Any] = {"executor": row.method.split()[1]}
    if "offload" in row.method:
        options["offload"] = "host"
    if "trees" in row.method:
        options["inductor"] = {}
    run = remat.compile(
        model, memory_budget=row.budget, time_limit=_SOLVE_SECONDS, on_unplanned="ignore", **options
    )
    recorded = "cudagraph" in row.method
    return Prepared(
        model, batch, _training(run, model, batch), lambda: run.plans[-1], recorded=recorded
    )


def _training(run: Callable[..., Tensor], model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = run(*batch)
        loss.backward()
        return loss

    return step


def _whole_step(model: nn.Module, batch: Batch, row: Row) -> Prepared:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def train(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    executor = row.method.split()[1]
    offload = "host" if "offload" in row.method else False
    run = remat.compile_step(
        train,
        memory_budget=row.budget,
        executor=executor,
        time_limit=_SOLVE_SECONDS,
        offload=offload,
    )
    return Prepared(
        model, batch, lambda: run(*batch), lambda: run.plans[-1],
        recorded=executor == "cudagraph", updates=True,
    )  # fmt: skip


@contextmanager
def stock_budget(row: Row) -> Iterator[None]:
    """torch's own ``activation_memory_budget``, where the row is of it."""
    import torch._functorch.config as config

    value = row.budget if row.method == "stock budget" else 1.0
    with config.patch(activation_memory_budget=value):
        yield


class References:
    """Gradients of the plain models, on the host; made once for each model."""

    def __init__(self, device: str, small: bool) -> None:
        self._device, self._small = device, small
        self._known: dict[str, list[Tensor]] = {}

    def error(self, row: Row, model: nn.Module) -> float:
        """How far the gradients of ``model`` are from those of the plain one."""
        if row.model not in self._known:
            plain, batch = build(row.model, self._device, small=self._small)
            plain(*batch).backward()
            self._known[row.model] = [
                p.grad.cpu() for p in plain.parameters() if p.grad is not None
            ]
        ours = [p.grad for p in model.parameters() if p.grad is not None]
        return relative_error(ours, self._known[row.model])


def described_machine(device: str, small: bool) -> str:
    """What a result depends on beside its row."""
    name = platform.processor() or platform.machine()
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} ({format_bytes(properties.total_memory)})"
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    size = "tiny models" if small else "full size"
    python = platform.python_version()
    code = rows.code_version(*rows.REMAT, "benchmarks/cuda_check.py", _MODELS)
    return f"{name}, torch {torch.__version__}{cuda}, Python {python}, code {code}, {size}"


def run_row(row: Row, device: str, small: bool, references: References) -> Result:
    """Compile, measure, time and compare one row; errors become part of the result."""
    start = time.perf_counter()
    result = Result(row.key, described_machine(device, small))
    try:
        with stock_budget(row):
            prepared = prepare(row, device, small)
            _measure(prepared, result, device)
            _time(row, prepared, result, device, small)
        if not prepared.updates:
            result.gradient_error = references.error(row, prepared.model)
    except Exception as error:  # noqa: BLE001  (a row that fails must not end the table)
        result.error = f"{type(error).__name__}: {error}"[:400]
    result.wall = time.perf_counter() - start
    return result


def _measure(prepared: Prepared, result: Result, device: str) -> None:
    resident = (prepared.model, prepared.batch)
    if prepared.recorded:
        for _ in range(3):  # as it is, recorded, replayed
            loss = prepared.step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        result.allocated = torch.cuda.memory_allocated()
        result.reserved = torch.cuda.memory_reserved()
    else:
        measured = remat.measure(prepared.step, resident, warmup=2, device=device)
        result.allocated, result.reserved = measured.peak, measured.reserved
        loss = prepared.step()
    result.loss = float(loss.detach())
    plan = prepared.plan()
    result.predicted = None if plan is None else plan.peak


def _time(row: Row, prepared: Prepared, result: Result, device: str, small: bool) -> None:
    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    wait()
    steps, start = 0, time.perf_counter()
    while steps < 3 or time.perf_counter() - start < _TIMED_SECONDS:
        prepared.step()
        wait()
        steps += 1
        if small and steps == 3:
            break
    shape = tiny(SHAPES[row.model]) if small else SHAPES[row.model]
    result.tokens_per_second = steps * shape.tokens / (time.perf_counter() - start)


def _tidy(device: str) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def known_results(path: Path, retry: bool, machine: str) -> dict[str, Result]:
    """What a run before has written on this machine; the last of each key, without errors if they
    are retried.
    """
    found: dict[str, Result] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            result = Result(**json.loads(line))
            if result.machine == machine:
                found[result.key] = result
    return {key: result for key, result in found.items() if not (retry and result.error)}


def table(results: Sequence[Result]) -> str:
    """All rows as Markdown."""
    lines = [
        "| row | predicted | allocated | reserved | tokens/s | gradients | loss | s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        if r.error:
            lines.append(f"| {r.key} | {r.error} |  |  |  |  |  | {r.wall:.0f} |")
            continue
        sizes = (_bytes(size) for size in (r.predicted, r.allocated, r.reserved))
        speed = "" if r.tokens_per_second is None else f"{r.tokens_per_second:,.0f}"
        error = "" if r.gradient_error is None else f"{r.gradient_error:.1e}"
        loss = "" if r.loss is None else f"{r.loss:.4f}"
        lines.append(
            f"| {r.key} | {' | '.join(sizes)} | {speed} | {error} | {loss} | {r.wall:.0f} |"
        )
    return "\n".join(lines)


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that are not known yet, as far as the time goes, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="rows: " + ", ".join(row.key for row in ROWS),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing behind that")
    parser.add_argument("--device", default="cuda", help="torch's name of it")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--retry", action="store_true", help="run rows again that failed")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("this torch sees no CUDA device; --device cpu --tiny runs what a CPU can")
        return 1
    start = time.perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "cuda_check.jsonl"
    machine = described_machine(asked.device, asked.tiny)
    print(f"{machine}; rows go to {path}", flush=True)
    known = known_results(path, asked.retry, machine)
    references = References(asked.device, asked.tiny)
    wanted = [row for row in ROWS if asked.only in row.key]
    if not wanted:
        parser.error(f"--only {asked.only!r} means no row; --help names them")
    print(table([]), flush=True)
    late: list[str] = []
    for row in wanted:
        if row.key in known or (asked.device == "cpu" and row.needs_cuda):
            continue
        if time.perf_counter() - start + row.seconds > asked.seconds:
            late.append(row.key)
            continue
        known[row.key] = run_row(row, asked.device, asked.tiny, references)
        with path.open("a") as file:
            file.write(json.dumps(asdict(known[row.key])) + "\n")
        print(table([known[row.key]]).splitlines()[-1], flush=True)
        _tidy(asked.device)
    print(f"\nall rows of this machine:\n{table([known[r.key] for r in ROWS if r.key in known])}")
    if late:
        print(f"no time was left for {len(late)} rows, run again: {', '.join(late)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
