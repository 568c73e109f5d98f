"""The peers: what torch and transformers offer for saving activations, each from its own package.

A method is given a fresh model and a counter, and returns what to call instead of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from benchmarks.flops import GraphFlops, counting

aten = torch.ops.aten
ATTENTION: Final = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)
MATMULS: Final = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

Run = Callable[..., Any]
Counted = Literal["dispatcher", "graphs"]


@dataclass(frozen=True)
class Method:
    """One way to run the step.

    Attributes:
        name, package: what it is and whose it is.
        prepare: (model, counter) -> what to call; switches the model over in place.
        counted: whether its ops reach the dispatcher under a mode, or its graphs are counted.
        budget: torch's activation_memory_budget while it is compiled.
    """

    name: str
    package: str
    prepare: Callable[[nn.Module, GraphFlops], Run]
    counted: Counted = "graphs"
    budget: float = 1.0

    @contextmanager
    def settings(self) -> Iterator[None]:
        """torch's options for this method."""
        with torch._functorch.config.patch(activation_memory_budget=self.budget):
            yield


def methods(inductor: bool = True) -> list[Method]:
    """Every peer; those that need a C++ compiler only if asked for."""
    eager = [
        Method("plain eager", "torch", _plain, "dispatcher"),
        Method("checkpoint every layer", "transformers", _every_layer(1), "dispatcher"),
        Method("checkpoint every 2nd layer", "transformers", _every_layer(2), "dispatcher"),
        Method(
            "selective checkpoint, keep matmuls and attention",
            "torch", _selective(lambda: _keep(MATMULS + ATTENTION)), "dispatcher",
        ),
        Method(
            "selective checkpoint, keep attention",
            "torch", _selective(lambda: _keep(ATTENTION)), "dispatcher",
        ),
    ]  # fmt: skip
    graph = [
        Method("compile, save everything", "torch", _compiled(_plain, default_partition)),
        Method("compile, min-cut", "torch", _compiled(_plain)),
        Method("compile, checkpoint every layer", "transformers", _compiled(_every_layer(1))),
        Method(
            "compile, selective checkpoint, every 2nd matmul",
            "torch", _compiled(_selective(_every_second_matmul)),
        ),
    ]  # fmt: skip
    budgets = (0.5, 0.25, 0.1, 0.0)
    graph += [
        Method(
            f"compile, min-cut, activation_memory_budget={b}", "torch", _compiled(_plain), budget=b
        )
        for b in budgets
    ]
    stock = [Method("inductor", "torch", _inductor)] + [
        Method(f"inductor, activation_memory_budget={b}", "torch", _inductor, budget=b)
        for b in budgets
    ]
    return eager + graph + (stock if inductor else [])


def save_everything(model: nn.Module, flops: GraphFlops) -> Run:
    """The graph without remat, run op by op: the reference for losses and gradients."""
    return _compiled(_plain, default_partition)(model, flops)


def _plain(model: nn.Module, _: GraphFlops) -> Run:
    return model


def _checkpoint_layers(model: nn.Module, every_n_layers: int = 1, **options: Any) -> None:
    model.network.activation_checkpointing_enable(
        {"use_reentrant": False, **options}, every_n_layers=every_n_layers
    )


def _every_layer(every_n_layers: int) -> Callable[[nn.Module, GraphFlops], Run]:
    def prepare(model: nn.Module, _: GraphFlops) -> Run:
        _checkpoint_layers(model, every_n_layers)
        return model

    return prepare


Policy = Callable[..., CheckpointPolicy]


def _keep(ops: Sequence[Any]) -> Policy:
    def policy(
        _: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _every_second_matmul() -> Policy:
    """What torchtitan ships: keep attention and the outputs of every second matmul."""
    met = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if op in MATMULS:
            met[context.is_recompute] += 1
            keep = met[context.is_recompute] % 2 == 1
        else:
            keep = op in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _selective(make_policy: Callable[[], Policy]) -> Callable[[nn.Module, GraphFlops], Run]:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(make_policy())

    def prepare(model: nn.Module, _: GraphFlops) -> Run:
        _checkpoint_layers(model, context_fn=contexts)
        return model

    return prepare


def _compiled(
    prepare: Callable[[nn.Module, GraphFlops], Run],
    partition: Callable[..., Any] = min_cut_rematerialization_partition,
) -> Callable[[nn.Module, GraphFlops], Run]:
    """torch.compile with torch's own partitioner, the graphs run op by op."""

    def prepare_compiled(model: nn.Module, flops: GraphFlops) -> Run:
        compiler = counting(boxed_nop, flops)
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
        return torch.compile(prepare(model, flops), backend=backend, fullgraph=True)

    return prepare_compiled


def _inductor(model: nn.Module, flops: GraphFlops) -> Run:
    """Stock torch.compile; its own partitioner is watched, not replaced."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Watched(CustomPartitionerFn):
        def __call__(
            self, joint: GraphModule, inputs: Sequence[object], **kwargs: Any
        ) -> tuple[GraphModule, GraphModule]:
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
            flops.add(forward)
            flops.add(backward)
            return forward, backward

        def uuid(self) -> object:
            return f"watched {torch._functorch.config.activation_memory_budget}"

    # A cached compilation does not call the partitioner, and would count nothing.
    options = {"custom_partitioner_fn": Watched(), "fx_graph_cache": False}
    return functools.partial(_call_uncached, torch.compile(model, options=options, fullgraph=True))


def _call_uncached(run: Run, *args: Tensor) -> Any:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return run(*args)
