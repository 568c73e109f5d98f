"""Reads of inputs that the step itself overwrites.

``y = (x * w + b).exp(); b.add_(1)``: whoever reads ``b`` after forward has ended reads the new
content. Stock torch does so, silently. So every read in backward of a primal that the step mutates
goes through a copy made in forward; whether forward's own readers, if they are run again, need one
is for the plan to decide (see ``lower.py``).
"""

from __future__ import annotations

import torch
from torch import fx

from remat.passes import ops
from remat.passes.joint import JointGraph, is_getitem
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.solvers.errors import CaptureError

SNAPSHOT = "remat_snapshot"
"""Node metadata: the primal this node is a copy of."""


def pin_mutated_reads(joint: JointGraph) -> JointGraph:
    """Give every backward or deferred reader of a mutated primal a copy made in forward.

    A graph without such readers is returned as it is.
    """
    if not joint.mutated_primals:
        return joint
    storages = Storages.of(joint)
    changed = False
    for primal in sorted(joint.mutated_primals, key=lambda node: node.name):
        _refuse_strided_reads(primal)
        late = [node for node in primal.users if _is_read_late(joint, storages, node)]
        if primal in joint.written_in_backward:  # who writes into it reads it as it is then
            primal.meta[private.NO_VERSION_CHECK] = True
            late = [node for node in late if joint.phases[node] != "backward"]
        if late:
            _insert_snapshot(joint, primal, late)
            changed = True
    if not changed:
        return joint
    joint.module.recompile()
    return JointGraph.make(joint.module, joint.num_forward_outputs)


def reads_overwritten(joint: JointGraph, backward: fx.GraphModule) -> bool:
    """Whether a backward graph of torch's is given memory that forward has written into by then.

    torch's min-cut partition computes a forward reader of a mutated primal again in backward, from
    the new content: a wrong gradient, and no error.
    """
    overwritten = joint.mutated_primals - joint.written_in_backward
    if not overwritten:
        return False
    storages = Storages.of(joint)
    written = {storage for primal in overwritten for storage in storages.created[primal]}
    given = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    return any(node.name in given and written & set(storages.held[node]) for node in joint.nodes)


def _is_read_late(joint: JointGraph, storages: Storages, node: fx.Node) -> bool:
    """Whether the node is, or is a view that feeds, something that runs after forward."""
    if node.op == "output":
        return False
    if joint.phases[node] != "forward":
        return True
    if not storages.is_alias(node):
        return False
    return any(_is_read_late(joint, storages, user) for user in node.users)


def _insert_snapshot(joint: JointGraph, primal: fx.Node, late: list[fx.Node]) -> None:
    graph = joint.module.graph
    first = next(node for node in joint.nodes if node.op == "call_function")
    with graph.inserting_before(first):
        copy, read = copied(graph, primal, primal.meta["val"])
    for made in {copy, read}:
        kept = ("partitioner_tag", "tensor_meta") if made is copy is read else ("partitioner_tag",)
        made.meta |= {key: primal.meta[key] for key in kept if key in primal.meta}
    copy.meta[SNAPSHOT] = primal
    for node in late:
        node.replace_input_with(primal, read)
    _refresh_views(joint, copy)


def copied(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    """(a copy, what reads it as ``source`` was read): of the same strides, as who reads them adds
    up in their order. ``clone`` closes the gaps of a tensor that has any.
    """
    clone, view = torch.ops.aten.clone.default, torch.ops.aten.as_strided.default
    shape, stride = list(value.shape), list(value.stride())
    with value.fake_mode:  # type: ignore[attr-defined]
        if _keeps_strides(value):
            made = graph.call_function(clone, (source,))
            made.meta["val"] = torch.empty_strided(
                shape, stride, dtype=value.dtype, device=value.device
            )
            return made, made
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        flat = graph.call_function(view, (source, [extent], [1]))
        flat.meta["val"] = value.detach().as_strided([extent], [1])
        made = graph.call_function(clone, (flat,))
        made.meta["val"] = torch.empty(extent, dtype=value.dtype, device=value.device)
        read = graph.call_function(view, (made, shape, stride, 0))
        read.meta["val"] = made.meta["val"].as_strided(shape, stride, 0)
    return made, read


def _keeps_strides(value: torch.Tensor) -> bool:
    """Whether a clone does."""
    return torch.empty_like(value).stride() == value.stride()


def _refuse_strided_reads(primal: fx.Node) -> None:
    """A copy does not begin where the storage of a view does."""
    value = primal.meta["val"]
    if value.storage_offset() == 0 and _keeps_strides(value):
        return
    for node in primal.users:
        if node.target is torch.ops.aten.as_strided.default and len(node.args) > 3:
            raise CaptureError(
                f"{primal.name}, of shape {tuple(value.shape)}, is a view into other memory, is "
                "read by as_strided and written in forward, of which remat can keep no copy: give "
                "it memory of its own (.clone()), or read it by indexing"
            )


def _refresh_views(joint: JointGraph, copy: fx.Node) -> None:
    """Fake values of views of the copy must lie in the copy's storage, not in the primal's."""
    stale = {copy}
    for node in joint.module.graph.nodes:
        passes_on = ops.is_view(node) or is_getitem(node)
        if passes_on and any(source in stale for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with copy.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            stale.add(node)
