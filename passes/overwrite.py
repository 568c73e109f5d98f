"""Backward ops that write their result over an input nobody reads afterwards.

A fusing compiler gives the two one allocation where the element written is the element read and
the sizes agree. In the problem such an op has a negative workspace: the input and the result are
alive together, and count once.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from remat.passes.fusion import Fusion
from remat.passes.lower import Lowered
from remat.solvers.problem import Op, Problem


def overwrite_inputs(lowered: Lowered, fusion: Fusion, *, donated: bool) -> Lowered:
    """Give every such op its negative workspace.

    Args:
        donated: whether what forward saved may be written over too, after which a second backward
            through the same forward is not possible.
    """
    ops = list(lowered.problem.ops)
    last_reader = {value: index for index, op in enumerate(ops) for value in op.reads}
    taken: set[int] = set()
    for index, op in enumerate(ops):
        node = lowered.ops[index].node
        if op.phase != "backward" or node is None or fusion.kinds.get(node) != "pointwise":
            continue
        for value in op.reads:
            last = last_reader[value]
            if value in taken or not _may_be_overwritten(lowered, value, donated):
                continue
            if _is_one_kernel(lowered, fusion, index, last) and _agree(lowered, value, node):
                taken.add(value)
                for place in range(index, last + 1):
                    ops[place] = _less(lowered.problem, ops[place], value)
                break
    return dataclasses.replace(
        lowered, problem=dataclasses.replace(lowered.problem, ops=tuple(ops))
    )


def _may_be_overwritten(lowered: Lowered, value: int, donated: bool) -> bool:
    held = lowered.problem.values[value]
    if held.owned or held.output or held.tangent or held.bytes == 0:
        return False
    return donated or lowered.problem.ops[lowered.problem.producer[value]].phase == "backward"


def _is_one_kernel(lowered: Lowered, fusion: Fusion, first: int, last: int) -> bool:
    """Whether the ops from ``first`` to ``last`` run as one."""
    kernels = {fusion.kernel.get(lowered.ops[at].node) for at in range(first, last + 1)}  # type: ignore[arg-type]
    return first <= last and len(kernels) == 1 and None not in kernels


def _agree(lowered: Lowered, value: int, node: fx.Node) -> bool:
    storage = next((s for s, v in lowered.value_of.items() if v == value), None)
    if storage is None:  # a snapshot, or a random state
        return False
    source = lowered.storages.holder[storage].meta["val"]
    result = node.meta["val"]
    if not isinstance(source, torch.Tensor):
        return False
    return source.dtype == result.dtype and source.numel() == result.numel()


def _less(problem: Problem, op: Op, value: int) -> Op:
    room = op.workspace + sum(problem.values[v].bytes for v in {*op.reads, *op.writes})
    saved = min(problem.values[value].bytes, room)
    return dataclasses.replace(op, workspace=op.workspace - saved)
