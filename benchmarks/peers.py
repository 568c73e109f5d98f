"""Side by side in one run: torch's and transformers' ways to save activations, and remat.

    python -m benchmarks.peers [--resume]

A GPT-2 with 12 layers, hidden 256, 8 heads, sequence 256, batch 8, vocabulary 1000, no dropout, in
fp32 on the CPU. *Peak* is what one step allocates above parameters and inputs (measured), *GFLOP*
what it computes (counted by torch). remat runs at every peer's peak and at fixed budgets; a peer is
beaten if remat peaks lower at no more FLOPs, or computes less at no higher peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks import rows
from benchmarks.flops import GraphFlops, count
from benchmarks.methods import Method, Run, methods, save_everything
from remat.measurement import Measurement, measure
from remat.solvers.errors import BudgetTooSmall, RematError
from remat.solvers.units import MIB
from tests.models.steps import Outcome, TrainingStep, differences, resident, run_step
from tests.models.zoo import LanguageModel

BUDGETS_MIB: Final = (284.0, 208.8, 120.8, 109.2, 102.7, 85.0, 78.0)


@dataclass(frozen=True)
class Row:
    """What one method took: bytes above the resident ones, FLOPs, and how its numbers differ."""

    name: str
    package: str
    peak: int
    flops: int
    numbers: str
    budget: int | None = None


def gpt2(layers: int = 12) -> TrainingStep:
    """The step that is compared; the same weights and tokens every time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=256, n_head=8, vocab_size=1000, n_positions=256, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LanguageModel(GPT2LMHeadModel(config)).train()
    tokens = torch.randint(0, 1000, (8, 256))
    return TrainingStep("gpt2", model, (tokens, tokens.clone()))


def measure_step(run: Run, step: TrainingStep) -> Measurement:
    """True peak of one step that starts without gradients; its graph bytes include them."""

    def once() -> object:
        losses = run(*step.args)
        losses.backward()
        step.model.zero_grad(set_to_none=True)
        return losses

    return measure(once, resident=resident(step), warmup=0)  # run_step has warmed it up


def run_peer(method: Method, layers: int, reference: Outcome) -> Row:
    """Measure one peer in a fresh compiler and a fresh model."""
    torch._dynamo.reset()
    step, counter = gpt2(layers), GraphFlops()
    with method.settings():
        run = method.prepare(step.model, counter)
        numbers = _compare(reference, run_step(run, step))
        measured = measure_step(run, step)
        if method.counted == "dispatcher":
            flops = count(lambda: run(*step.args).backward())
        else:
            flops = counter.flops
            if counter.graphs != 2:
                raise RematError(f"{method.name}: {counter.graphs} graphs were counted, not two")
    return Row(method.name, method.package, measured.graph, flops, numbers)


def run_ours(budget: int, layers: int, reference: Outcome, forward_flops: int) -> Row | str:
    """Measure remat under ``budget`` bytes above the resident ones; why not, if it cannot."""
    import remat

    torch._dynamo.reset()
    step = gpt2(layers)
    inside = measure(lambda: None, resident=resident(step)).resident
    run = remat.compile(step.model, memory_budget=inside + budget, executor="eager", cost="flops")
    try:
        numbers = _compare(reference, run_step(run, step))
    except BudgetTooSmall as error:
        least = (error.least_peak - inside) / MIB
        return f"no plan within {budget / MIB:.1f} MiB: the least peak is {least:.1f} MiB"
    measured = measure_step(run, step)
    # A dispatch mode around the call would make Dynamo skip it; backward is no frame of Dynamo's.
    flops = forward_flops + count(run(*step.args).backward)
    return Row("remat", "remat", measured.graph, flops, numbers, budget)


def _compare(reference: Outcome, outcome: Outcome) -> str:
    if not differences(reference, outcome):
        return "identical"
    worst = 0.0
    for name, wanted in reference.items():
        if name.startswith(("loss", "gradient")):
            error = (outcome[name].double() - wanted.double()).abs().max()
            worst = max(worst, float(error / wanted.double().abs().max()))
    return f"within {worst:.0e}"


def beats(ours: Row, peer: Row) -> bool:
    """Lower peak at no more FLOPs, or fewer FLOPs at no higher peak."""
    no_worse = ours.peak <= peer.peak and ours.flops <= peer.flops
    return no_worse and (ours.peak < peer.peak or ours.flops < peer.flops)


def peers_table(peers: Sequence[Row], ours: Sequence[Row]) -> list[str]:
    """One line a peer: its figures, the best of ours that is no worse, the verdict."""
    lines = [
        "| peer | package | peak MiB | GFLOP | numbers "
        "| remat: peak MiB | GFLOP | strictly better |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    for peer in peers:
        better = [row for row in ours if beats(row, peer)]
        best = min(better, key=lambda row: (row.flops, row.peak), default=None)
        figures = (
            f"{best.peak / MIB:.1f} | {best.flops / 1e9:.1f} | yes" if best else "– | – | **no**"
        )
        lines.append(
            f"| {peer.name} | {peer.package} | {peer.peak / MIB:.1f} | {peer.flops / 1e9:.1f} "
            f"| {peer.numbers} | {figures} |"
        )
    return lines


def ours_table(ours: Sequence[Row], failures: Sequence[str]) -> list[str]:
    """One line a budget."""
    lines = ["| budget MiB | measured peak MiB | GFLOP | numbers |", "|---:|---:|---:|---|"]
    for row in sorted(ours, key=lambda row: -(row.budget or 0)):
        held = "" if row.budget is None or row.peak <= row.budget else " **over**"
        budget = "none" if row.budget is None else f"{row.budget / MIB:.2f}"
        lines.append(
            f"| {budget} | {row.peak / MIB:.2f}{held} | {row.flops / 1e9:.1f} | {row.numbers} |"
        )
    return [*lines, "", *failures]


def report(peers: Sequence[Row], ours: Sequence[Row], failures: Sequence[str]) -> str:
    """The whole page, in Markdown."""
    notes = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    head = ["# Side by side", "", notes, "", f"torch {torch.__version__}.", ""]
    numbers = (
        "*Numbers* compares loss and every gradient with the graph without remat: identical bit "
        "for bit, or the largest error relative to the largest entry of its tensor."
    )
    return "\n".join(
        [*head, numbers, "", *peers_table(peers, ours), "", "## remat, by budget", "",
         *ours_table(ours, failures), ""]
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 1 if a peer is not beaten, a budget broken or a gradient changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="12; fewer for a trial run")
    parser.add_argument("--no-inductor", action="store_true", help="leave inductor's rows out")
    parser.add_argument("--no-remat", action="store_true", help="only the peers")
    parser.add_argument("--resume", action="store_true", help="skip what this code has done")
    parser.add_argument("--results", type=Path, default=rows.RESULTS)
    options = parser.parse_args(arguments)
    run = _SideBySide(options.layers, options.results / "peers.jsonl", options.resume)
    peers = [run.peer(method) for method in methods(inductor=not options.no_inductor)]
    ours, failures = ([], []) if options.no_remat else run.ours(peers)
    text = report(peers, ours, failures)
    (options.results / "peers.md").write_text(text, encoding="utf-8")
    print(text)
    return int(not _all_good(peers, ours))


class _SideBySide:
    """Runs what has not been run yet, and writes down every row as it comes."""

    def __init__(self, layers: int, path: Path, resume: bool) -> None:
        self._layers, self._path = layers, path
        of_peers = ("benchmarks/methods.py", "benchmarks/flops.py", "tests/models/steps.py")
        self._versions = {
            "peer": f"{rows.code_version(*of_peers)} {layers}",
            "remat": f"{rows.code_version(*rows.REMAT, *of_peers)} {layers}",
        }
        if not resume:
            path.unlink(missing_ok=True)
        stored = [Row(**row) for row in rows.read(path, list(self._versions.values()))]
        self._done = {(row.name, row.budget): row for row in stored}
        step = gpt2(layers)
        self._reference = run_step(save_everything(step.model, GraphFlops()), step)
        self._forward_flops = count(lambda: gpt2(layers).model(*step.args))

    def peer(self, method: Method) -> Row:
        if (method.name, None) not in self._done:
            row = run_peer(method, self._layers, self._reference)
            self._write("peer", row)
            print(peers_table([row], ())[-1], flush=True)
        return self._done[method.name, None]

    def ours(self, peers: Sequence[Row]) -> tuple[list[Row], list[str]]:
        """remat at the fixed budgets and at every peer's peak; and what it said it cannot do."""
        failures: list[str] = []
        budgets = {int(mib * MIB) for mib in BUDGETS_MIB} | {peer.peak for peer in peers}
        for budget in sorted(budgets, reverse=True):
            if ("remat", budget) in self._done:
                continue
            row = run_ours(budget, self._layers, self._reference, self._forward_flops)
            if isinstance(row, str):
                failures.append(row)
            else:
                self._write("remat", row)
            print(row if isinstance(row, str) else ours_table([row], ())[2], flush=True)
        return [row for row in self._done.values() if row.budget in budgets], failures

    def _write(self, kind: str, row: Row) -> None:
        rows.append(self._path, self._versions[kind], dataclasses.asdict(row))
        self._done[row.name, row.budget] = row
        gc.collect()


def _all_good(peers: Sequence[Row], ours: Sequence[Row]) -> bool:
    held = all(row.budget is None or row.peak <= row.budget for row in ours)
    identical = all(row.numbers == "identical" for row in ours)
    return held and identical and all(any(beats(row, peer) for row in ours) for peer in peers)


if __name__ == "__main__":
    sys.exit(main())
