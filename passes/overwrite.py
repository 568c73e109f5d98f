"""What a fused kernel allocates: all its results at once, some of them over an input that dies.

The ops of a kernel stand one after the other in a problem, but their results are allocated before
the first runs, and their inputs are freed after the last. So the first op of a kernel has the later
results as workspace.

Where the element written is the element read, the sizes agree and nobody reads the input later,
the two are one allocation. Such an op has a negative workspace: the input and the result are alive
together, and count once.

Both are said of backward only, whose ops run once; a forward op may be run again by itself.
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
    storage_of = {value: storage for storage, value in lowered.value_of.items()}
    taken: set[int] = set()
    for index, op in enumerate(ops):
        node = lowered.ops[index].node
        if op.phase != "backward" or node is None or fusion.kinds.get(node) != "pointwise":
            continue
        for value in op.reads:
            last = last_reader[value]
            if value in taken or not _may_be_overwritten(lowered, fusion, value, donated):
                continue
            if _is_one_kernel(lowered, fusion, index, last) and _agree(
                lowered, storage_of.get(value), node
            ):
                taken.add(value)
                for place in range(index, last + 1):
                    ops[place] = _less(lowered.problem, ops[place], value)
                break
    _allocate_at_once(lowered, fusion, ops)
    return dataclasses.replace(
        lowered, problem=dataclasses.replace(lowered.problem, ops=tuple(ops))
    )


def _allocate_at_once(lowered: Lowered, fusion: Fusion, ops: list[Op]) -> None:
    """Give the first op of each kernel what the later ones allocate."""
    values = lowered.problem.values
    kernels = [_backward_kernel(lowered, fusion, index) for index in range(len(ops))]
    first = 0
    for index, op in enumerate(ops):
        if kernels[index] is None or index == 0 or kernels[index] != kernels[index - 1]:
            first = index
            continue
        # A result that is written over an input adds nothing; ``workspace`` says how much it saves.
        added = sum(values[v].bytes for v in op.writes) + min(0, op.workspace)
        saved_before = min(0, ops[index - 1].workspace)
        added = max(0, added - saved_before)
        ops[first] = dataclasses.replace(ops[first], workspace=ops[first].workspace + added)


def _backward_kernel(lowered: Lowered, fusion: Fusion, index: int) -> int | None:
    node = lowered.ops[index].node
    if node is None or lowered.problem.ops[index].phase != "backward":
        return None
    return fusion.kernel.get(node)


def _may_be_overwritten(lowered: Lowered, fusion: Fusion, value: int, donated: bool) -> bool:
    held, producer = lowered.problem.values[value], lowered.problem.producer[value]
    if held.owned or held.output or held.tangent or held.bytes == 0:
        return False
    node = lowered.ops[producer].node
    if node is None or fusion.kinds.get(node) == "generated":
        return False  # a scatter writes into a buffer of its own, which no other op gets
    return donated or lowered.problem.ops[producer].phase == "backward"


def _is_one_kernel(lowered: Lowered, fusion: Fusion, first: int, last: int) -> bool:
    """Whether the ops from ``first`` to ``last`` run as one."""
    kernels = {fusion.kernel.get(lowered.ops[at].node) for at in range(first, last + 1)}  # type: ignore[arg-type]
    return first <= last and len(kernels) == 1 and None not in kernels


def _agree(lowered: Lowered, storage: int | None, node: fx.Node) -> bool:
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
