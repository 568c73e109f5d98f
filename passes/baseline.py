"""What the executor does unasked, as a schedule, so that the same simulator prices it."""

from __future__ import annotations

from torch import fx

from remat.passes.lower import Lowered
from remat.solvers.demand import missing_ops
from remat.solvers.schedule import Schedule


def baseline_schedule(
    lowered: Lowered, forward: fx.GraphModule, backward: fx.GraphModule
) -> Schedule:
    """The schedule that torch's own two graphs follow.

    Nodes of the two graphs bear the names of the joint graph's. An op that backward has again (a
    region the user checkpoints) is a recomputation.
    """
    problem = lowered.problem
    index_of = {op.name: index for index, op in enumerate(problem.ops)}
    in_forward = set(_ops_of(forward, index_of))
    order = sorted(in_forward | set(problem.forward))
    present = {value for index in order for value in problem.ops[index].writes}
    computes = list(order)
    listed = _ops_of(backward, index_of)
    missing = set(problem.backward) - set(listed)
    for index in [*listed, *sorted(missing)]:
        if set(problem.ops[index].writes) <= present and problem.ops[index].phase != "backward":
            if index in in_forward and problem.ops[index].rerunnable:
                computes.append(index)
            continue
        for runs in (*missing_ops(problem, present, problem.ops[index].reads), index):
            computes.append(runs)
            present.update(problem.ops[runs].writes)
    return Schedule.from_computes(problem, computes)


def _ops_of(graph: fx.GraphModule, index_of: dict[str, int]) -> list[int]:
    return [
        index_of[node.name]
        for node in graph.graph.nodes
        if node.op == "call_function" and node.name in index_of
    ]
