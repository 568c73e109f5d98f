"""``mincut``: save the fewest bytes such that backward can recompute the rest without heavy ops.

The idea of torch's stock partitioner (H. He, "Min-cut optimal(*) recomputation", PyTorch
developer forum 2022), as a yardstick. It bounds neither the peak nor the time, and looks at no
budget.

Formulation: each forward value v is an arc v_in -> v_out whose capacity is its bytes, 0 if it is
always there anyway. An op that reads u and writes w is an arc u_out -> w_in of infinite
capacity. The source leads to w_in if the op that writes w is not to be run again, v_out leads to
the sink if backward needs v. The minimum cut is the saved set. Everything else is recomputed
when first needed and then kept to its last read, so that no op runs more than twice.

Which ops are not to be run again, as in the stock partitioner: those that count FLOPs (matmul,
convolution) and attention, random ones, and reductions, whose result is at most a quarter of
what they read. Ops whose path from the source is infinite are free of choice: they are saved.
"""

from __future__ import annotations

from typing import Final

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

from remat.solvers.demand import always_kept
from remat.solvers.problem import Op, Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.schedule import Schedule
from remat.solvers.segments import Demands, replay

_REDUCTION: Final = 4
# Attention is as heavy as the matmuls it fuses, also where a problem states no FLOPs for it.
_HEAVY_TARGETS: Final = ("attention",)


@register("mincut")
def solve_mincut(request: Request) -> Proposal:
    """The minimum-cut plan."""
    problem = request.problem
    saved = least_saved(problem)
    held_from = [0] * len(problem.values)
    for index in problem.forward:
        for v in problem.ops[index].writes:
            held_from[v] = 0 if v in saved else 1
    return Proposal(Schedule.from_computes(problem, replay(problem, held_from)))


def least_saved(problem: Problem) -> set[int]:
    """The forward values to save: a minimum cut by bytes."""
    flow = _network(problem)
    if not (flow.has_node("source") and flow.has_node("sink")):
        return set()
    _, (reached, _) = nx.minimum_cut(flow, "source", "sink", flow_func=boykov_kolmogorov)
    return {
        v
        for index in problem.forward
        for v in problem.ops[index].writes
        if ("in", v) in reached and ("out", v) not in reached
    }


def _network(problem: Problem) -> nx.DiGraph:
    flow, kept, demands = nx.DiGraph(), always_kept(problem), Demands.of(problem)
    for index in problem.forward:
        op = problem.ops[index]
        for w in op.writes:
            flow.add_edge(("in", w), ("out", w), capacity=0 if kept[w] else problem.values[w].bytes)
            if _is_heavy(problem, op):
                flow.add_edge("source", ("in", w))
            if demands.last[w] >= 0:
                flow.add_edge(("out", w), "sink")
            for u in op.reads:
                if not problem.values[u].owned:
                    flow.add_edge(("out", u), ("in", w))
    return flow


def _is_heavy(problem: Problem, op: Op) -> bool:
    if op.flops > 0 or op.random or not op.rerunnable:
        return True
    if any(word in op.target for word in _HEAVY_TARGETS):
        return True
    read = sum(problem.values[v].bytes for v in op.reads)
    return _REDUCTION * sum(problem.values[v].bytes for v in op.writes) < read
