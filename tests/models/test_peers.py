"""The side-by-side run counts what it says, and its verdicts follow from the figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from benchmarks import flops, peers
from benchmarks.methods import methods, save_everything
from remat.cost.flops import node_flops
from remat.solvers.units import MIB
from tests.models.steps import run_step, train_once
from tests.models.zoo import STEPS

ROW = peers.Row("peer", "torch", peak=100 * MIB, flops=10**9, numbers="identical")


def test_graph_and_dispatcher_count_the_same() -> None:
    import torch

    step, counter, ours = STEPS["gpt2"](), flops.GraphFlops(), [0]

    def compiler(graph: GraphModule, inputs: list[Tensor]) -> object:
        ours[0] += sum(node_flops(node) for node in graph.graph.nodes)
        return boxed_nop(graph, inputs)

    counting = flops.counting(compiler, counter)
    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=partition)
    losses = torch.compile(step.model, backend=backend, fullgraph=True)(*step.args)
    backward = flops.count(losses.backward)
    assert counter.graphs == 2
    assert counter.flops == ours[0] == flops.count(lambda: train_once(step.model, step))
    assert counter.flops == backward + flops.count(lambda: step.model(*step.args))


def test_peers_keep_the_numbers_and_cost_what_they_should() -> None:
    by_name = {method.name: method for method in methods(inductor=False)}
    step = peers.gpt2(layers=1)
    reference = run_step(save_everything(step.model, flops.GraphFlops()), step)
    rows = {
        name: peers.run_peer(by_name[name], 1, reference)
        for name in ("plain eager", "checkpoint every layer", "compile, checkpoint every layer")
    }
    assert {row.numbers for row in rows.values()} == {"identical"}
    plain, frugal = rows["plain eager"], rows["checkpoint every layer"]
    assert plain.peak > frugal.peak
    forward = flops.count(lambda: step.model(*step.args))
    tokens, hidden, vocabulary = 8 * 256, 256, 1000
    head = 2 * tokens * hidden * vocabulary
    last_product = 2 * tokens * (4 * hidden) * hidden  # nothing of a layer reads what it ends with
    assert frugal.flops == plain.flops + forward - head - last_product
    # An op inside a random-state wrapper counts: the compiled rows recompute attention too.
    assert rows["compile, checkpoint every layer"].flops >= frugal.flops


def test_beating_a_peer_is_strict() -> None:
    def ours(peak: int, flops: int) -> bool:
        row = dataclasses.replace(ROW, peak=ROW.peak + peak, flops=ROW.flops + flops)
        return peers.beats(row, ROW)

    assert ours(-1, 0)
    assert ours(0, -1)
    assert not ours(0, 0)
    assert not ours(-1, 1)
    assert not ours(1, -1)


def test_the_report_says_whom_remat_beats_and_which_budget_broke() -> None:
    better = dataclasses.replace(ROW, name="remat", peak=90 * MIB, budget=89 * MIB)
    other = dataclasses.replace(ROW, name="frugal", peak=10 * MIB)
    text = peers.report([ROW, other], [better], ["no plan within 1.0 MiB"])
    lines = text.splitlines()
    assert "| peer | torch | 100.0 | 1.0 | identical | 90.0 | 1.0 | yes |" in lines
    assert "| frugal | torch | 10.0 | 1.0 | identical | – | – | **no** |" in lines
    assert "| 89.00 | 90.00 **over** | 1.0 | identical |" in lines
    assert "no plan within 1.0 MiB" in lines


def test_options_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ending:
        peers.main(["--layers", "two", "--results", str(tmp_path)])
    assert ending.value.code == 2
