"""Joint graphs of small functions, captured the way remat captures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.passes.baseline import baseline_schedule
from remat.passes.costs import OpCost
from remat.passes.fusion import fuse
from remat.passes.joint import JointGraph
from remat.passes.lower import Lowered, lower, op_nodes
from remat.passes.mutation import pin_mutated_reads
from remat.passes.offload import Place
from remat.passes.split import split
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.passes.verify import verify_split
from remat.solvers.schedule import Schedule

Planner = Callable[[Lowered, Schedule], Schedule | None]


@dataclass
class Captured:
    """What one capture saw."""

    joint: JointGraph
    lowered: Lowered
    baseline: Schedule
    schedule: Schedule | None = None


def is_product(node: fx.Node) -> bool:
    """What a compiler without kernels of its own for products calls a library for."""
    return any(name in str(node.target) for name in ("mm.default", "bmm.default"))


def compile_with(
    function: Callable[..., Any],
    planner: Planner,
    *,
    inlines: bool = False,
    place: Place | None = None,
) -> tuple[Callable[..., Any], list]:
    """Compile ``function`` so that it runs the schedule ``planner`` gives (None: torch's own).

    With ``inlines``, pointwise values are not stored, as under a compiler that fuses. ``place`` is
    where the schedule offloads to.
    """
    seen: list[Captured] = []

    def partition(
        module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = pin_mutated_reads(JointGraph.make(module, num_fwd_outputs))
        inlined = fuse(joint, is_product).inlined if inlines else frozenset()
        storages = Storages.of(joint, inlined=inlined)
        costs = {node: OpCost(1e-6) for node in op_nodes(joint, storages)}
        lowered = lower(joint, storages, costs)
        own = private.default_partition(module, inputs, num_fwd_outputs, **options)
        baseline = baseline_schedule(lowered, *own)
        schedule = planner(lowered, baseline)
        seen.append(Captured(joint, lowered, baseline, schedule))
        if schedule is None:
            return own
        forward, backward = split(lowered, schedule, place)
        verify_split(lowered, schedule, forward, backward)
        return forward, backward

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return private.aot_compile(graph, inputs, partition=partition)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True), seen


def capture(function: Callable[..., Any], *args: Any, inlines: bool = False) -> Captured:
    """Capture the training step of ``function(*args)`` under torch's own partition."""
    run, seen = compile_with(function, lambda lowered, baseline: None, inlines=inlines)
    run(*args)
    (captured,) = seen
    return captured
