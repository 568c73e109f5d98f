"""A pass leaves a valid graph, and the emitted graphs are the schedule: run between passes."""

from __future__ import annotations

from torch import fx

from remat.passes import ops
from remat.passes.joint import JointGraph
from remat.passes.lower import Lowered
from remat.passes.offload import TRANSFER
from remat.passes.split import OP_INDEX
from remat.passes.torch_private import partition as private
from remat.solvers.errors import RematError
from remat.solvers.schedule import Schedule, Step


def verify_joint(joint: JointGraph, after: str) -> None:
    """Check a joint graph; ``after`` names the pass that made it.

    Raises:
        RematError: what is wrong, and after which pass.
    """
    try:
        joint.module.graph.lint()
    except RuntimeError as error:
        raise RematError(f"the joint graph is broken after {after}: {error}") from error
    for node in joint.nodes:
        valued = node.op == "call_function" and not ops.returns_nothing(node)
        if valued and "val" not in node.meta:
            raise RematError(f"{node.name} has no fake value after {after}")
    if len(joint.backward_outputs) < len(joint.primals):
        raise RematError(
            f"after {after} there are {len(joint.backward_outputs)} gradients for "
            f"{len(joint.primals)} primals"
        )


def verify_split(
    lowered: Lowered, schedule: Schedule, forward: fx.GraphModule, backward: fx.GraphModule
) -> None:
    """Check that forward and backward fit together and run exactly the schedule's ops, in order.

    Raises:
        RematError: the first difference.
    """
    joint = lowered.joint
    returned = list(next(iter(reversed(forward.graph.nodes))).args[0])
    taken = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved = len(returned) - joint.num_forward_outputs
    if saved + len(joint.tangents) != len(taken):
        raise RematError(
            f"forward saves {saved} tensors and there are {len(joint.tangents)} tangents, "
            f"but backward takes {len(taken)}"
        )
    for node in taken:
        if node.name != node.target:
            raise RematError(f"argument {node.target} is renamed {node.name}, and so held twice")
    if any(not private.is_tangent(node) for node in taken[saved:]):
        raise RematError("backward's last placeholders are not the tangents")
    _verify_order(lowered, schedule, forward, backward)
    _verify_transfers(lowered, schedule, forward, backward)


def _verify_order(
    lowered: Lowered, schedule: Schedule, forward: fx.GraphModule, backward: fx.GraphModule
) -> None:
    planned = [index for index in schedule.computes if lowered.ops[index].kind == "node"]
    emitted = [
        node.meta[OP_INDEX]
        for graph in (forward.graph, backward.graph)
        for node in graph.nodes
        if OP_INDEX in node.meta
    ]
    for position, (wanted, found) in enumerate(zip(planned, emitted, strict=False)):
        if wanted != found:
            names = lowered.problem.ops[wanted].name, lowered.problem.ops[found].name
            raise RematError(f"op {position} of the schedule is {names[0]!r}, emitted {names[1]!r}")
    if len(planned) != len(emitted):
        raise RematError(f"the schedule runs {len(planned)} ops, {len(emitted)} were emitted")


def _verify_transfers(
    lowered: Lowered, schedule: Schedule, forward: fx.GraphModule, backward: fx.GraphModule
) -> None:
    """Every transfer is there, in order, and nobody reads a reloaded value before its wait."""
    planned = [step for step in schedule.steps if step.kind in ("offload", "reload", "wait")]
    emitted: list[Step] = []
    filling: dict[fx.Node, int] = {}
    for graph in (forward.graph, backward.graph):
        for node in graph.nodes:
            step = node.meta.get(TRANSFER)
            if step is not None and step.kind == "wait":
                filling = {made: v for made, v in filling.items() if v != step.index}
            for source in node.all_input_nodes:
                if source in filling:
                    name = lowered.problem.values[filling[source]].name
                    raise RematError(f"{node.name} reads {name} before its reload has ended")
            if step is not None:
                emitted.append(step)
                if step.kind == "reload":
                    filling[node] = step.index
    if planned != emitted:
        raise RematError(
            f"the schedule has {len(planned)} steps that transfer a value, {len(emitted)} were "
            "emitted, or in another order"
        )
