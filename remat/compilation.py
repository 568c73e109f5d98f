"""One captured graph becomes something that runs, and its plan: the seam between a session, which
remembers, and the executors, which run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.executors import cudagraph, eager, inductor
from remat.inductor import compile_step
from remat.options import Options
from remat.partitioner import Ledger, partition
from remat.passes.observe import label
from remat.passes.offload import offloaded_bytes
from remat.passes.storages import main_device
from remat.passes.tiers import hold
from remat.passes.torch_private import dynamo
from remat.passes.torch_private.double_backward import on_double_backward
from remat.passes.torch_private.written_outputs import WrittenOutputs
from remat.plan_log import log_plan
from remat.plans import Plan, Unplanned
from remat.solvers.errors import CaptureError, RematError
from remat.version import __version__


@dataclass(frozen=True)
class CompiledGraph:
    """A graph of Dynamo's, ready to run, and what was decided for it."""

    run: Callable[..., Any]
    plan: Plan | Unplanned

    @property
    def excess(self) -> int:
        """Bytes that the generated code takes beyond what was planned."""
        return max(0, self.plan.peak - self.plan.predicted) if isinstance(self.plan, Plan) else 0


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, ledger: Ledger
) -> CompiledGraph:
    """Compile one graph that Dynamo captured.

    Args:
        inputs: what it is called with.
        options: the executor and the budget among them.
        ledger: what is alive beside it.

    Raises:
        RematError: it has no plan that keeps the budget, or cannot be planned.
    """
    made = _compile_graph(graph, inputs, cudagraph.as_planned(options), ledger)
    log_plan(made.plan)
    return made


def _compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, ledger: Ledger
) -> CompiledGraph:
    if options.double_backward:
        return CompiledGraph(graph, Unplanned("double_backward=True: this graph runs uncompiled"))
    if options.executor == "inductor":
        compiled = _through_inductor(graph, inputs, options, ledger)
        return dataclasses.replace(compiled, run=_held(compiled.run, compiled.plan, inputs))
    made: list[Plan | Unplanned] = []

    def split(
        joint: fx.GraphModule, joint_inputs: Any, **torch_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        parts = partition(joint, joint_inputs, options, ledger, **torch_options)
        made.append(parts.plan)
        op_of = {op.name: index for index, op in enumerate(parts.plan.problem.ops)}
        label(parts.forward, parts.backward, parts.plan, op_of)
        return parts.forward, parts.backward

    executor = cudagraph if options.executor == "cudagraph" else eager
    with dynamo.outside_compilation():
        run = executor.compile_graph(
            graph, inputs, partition=split, on_inference=lambda _: made.append(_inference())
        )
    if len(made) != 1:
        raise RematError(
            f"one graph was partitioned {len(made)} times; nested graphs (invoke_subgraph) "
            "are not in this version"
        )
    run = _first_order(run)
    # A recording has tiers of its own.
    held = run if options.executor == "cudagraph" else _held(run, made[0], inputs)
    return CompiledGraph(held, made[0])


def _held(
    run: Callable[..., Any], plan: Plan | Unplanned, inputs: Sequence[Any]
) -> Callable[..., Any]:
    if isinstance(plan, Unplanned):
        return run
    tensors = (item for item in inputs if isinstance(item, torch.Tensor))
    return holding_tier(run, plan, main_device(tensors))


def holding_tier(run: Callable[..., Any], plan: Plan, device: torch.device) -> Callable[..., Any]:
    """The same callable, with room for what its plan offloads as long as it is held.

    Raises:
        RematError: there is not enough room.
    """
    if plan.offload is None or not plan.offloaded_bytes:
        return run
    tier = hold(plan.offload, device, offloaded_bytes(plan.problem, plan.solution.schedule))

    def call(*given: Any) -> Any:
        assert tier is not None
        return run(*given)

    return call


def _through_inductor(
    graph: fx.GraphModule, inputs: Sequence[Any], options: Options, ledger: Ledger
) -> CompiledGraph:
    with dynamo.outside_compilation():
        if not trains(inputs):
            made = inductor.compile_graph(
                graph,
                inputs,
                partition=_refuse_partition,
                key=__version__,
                inductor_options=options.inductor,
                donate=True,
            )
            return CompiledGraph(made.run, _inference())
        step = compile_step(graph, inputs, options, ledger)
    return CompiledGraph(_first_order(step.run), step.plan)


def trains(inputs: Sequence[Any]) -> bool:
    """Whether a call with these inputs records a backward."""
    return torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in inputs
    )


def _refuse_partition(*_: Any, **__: Any) -> Any:
    raise RematError("AOTAutograd split a graph in which nothing needs a gradient; report this")


def _first_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, refusing a second backward in words before torch does in the engine's, and one that
    would read what was written into outputs in between.
    """
    written = WrittenOutputs()

    def call(*inputs: Any) -> Any:
        outputs = run(*inputs)
        if torch.is_grad_enabled():
            written.watch(outputs)
            on_double_backward(outputs, _refuse_double_backward)
        return outputs

    return call


def _refuse_double_backward() -> None:
    raise CaptureError(
        "backward goes through the gradients of a compiled call (create_graph=True), and a "
        "compiled graph holds one backward: call the plain model in this step, or compile with "
        "double_backward=True, which runs the graph uncompiled and unplanned"
    )


def _inference() -> Unplanned:
    why = "gradients are off" if not torch.is_grad_enabled() else "nothing in it needs a gradient"
    return Unplanned(f"an inference-only call, {why}: it runs as it is")
