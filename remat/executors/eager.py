"""The eager executor: both graphs run op by op, in the order they were emitted in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from remat.passes.observe import watchable
from remat.passes.torch_private import partition as private

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: PartitionFunction,
    on_inference: Callable[[fx.GraphModule], None],
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        partition: splits the joint graph if the graph trains.
        on_inference: called with the forward graph if nothing in it needs a gradient.
    """

    def inference(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        on_inference(forward)
        return private.boxed(forward, inputs)

    return private.aot_compile(
        graph,
        example_inputs,
        partition=partition,
        compiler=watchable,
        inference_compiler=inference,
    )
