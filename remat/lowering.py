"""What each executor makes of a joint graph: the problem, and what it does unasked.

The eager executor stores every value and runs every op by itself. Inductor fuses, so that many
values are never stored; unasked it recomputes what torch's min-cut partition tells it to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.cost.device import DeviceSpec
from remat.cost.fused import fused_costs
from remat.cost.model import CostModel
from remat.passes.attention import kernels_in
from remat.passes.choices import lies_in
from remat.passes.costs import OpCost
from remat.passes.fusion import fuse
from remat.passes.joint import JointGraph
from remat.passes.layers import layers
from remat.passes.lower import Lowered, lower, op_nodes
from remat.passes.mutation import SNAPSHOT
from remat.passes.overwrite import overwrite_inputs
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.solvers.problem import Problem


@dataclass(frozen=True)
class Lowering:
    """One joint graph as an executor runs it.

    Attributes:
        own: forward and backward as torch splits them for this executor.
    """

    lowered: Lowered
    costs: Mapping[fx.Node, OpCost]
    own: tuple[fx.GraphModule, fx.GraphModule]


def lower_for_eager(
    joint: JointGraph,
    joint_inputs: Any,
    spec: DeviceSpec,
    device: torch.device,
    model: CostModel,
    resident: int,
    torch_options: Mapping[str, Any],
    *,
    replays_random: bool = True,
) -> Lowering:
    """Every op by itself; torch's own partition saves everything backward reads.

    Args:
        replays_random: whether random ops can run again; the host cannot set a generator's state
            inside a recorded graph.
    """
    storages = Storages.of(joint, spec.granularity, device.type)
    costs = model.costs(op_nodes(joint, storages))
    how = f"{model.mode} on {spec.name}"
    lowered = lower(
        joint,
        storages,
        costs,
        fixed_bytes=resident,
        cost=how,
        replays_random=replays_random,
        same_kernels=has_exact_kernels(device),
    )
    own = private.default_partition(
        joint.module, joint_inputs, joint.num_forward_outputs, **torch_options
    )
    return Lowering(lowered, costs, own)


def lower_for_inductor(
    joint: JointGraph,
    joint_inputs: Any,
    spec: DeviceSpec,
    device: torch.device,
    model: CostModel,
    resident: int,
    torch_options: Mapping[str, Any],
    *,
    donated: bool,
    keep: Sequence[str] = (),
) -> Lowering:
    """Ops as inductor is expected to fuse them.

    Args:
        keep: patterns of modules; what backward reads of them is stored, and not computed again in
            whoever reads it.
        donated: whether backward may write over what forward saved.
    """
    from remat.passes.torch_private.lowerings import is_library_call

    layer_of = layers(joint.nodes) if keep else {}
    fusion = fuse(joint, is_library_call, lambda node: lies_in(layer_of.get(node, ""), keep))
    storages = Storages.of(joint, spec.granularity, device.type, fusion.inlined)
    costs = fused_costs(op_nodes(joint, storages), fusion, model)
    how = f"{model.mode} on {spec.name}, fused"
    lowered = lower(
        joint,
        storages,
        costs,
        fixed_bytes=resident,
        cost=how,
        replays_random=False,
        same_kernels=False,  # what is computed again is fused with something else
    )
    lowered = overwrite_inputs(lowered, fusion, donated=donated)
    own = private.min_cut_partition(
        joint.module, joint_inputs, joint.num_forward_outputs, SNAPSHOT, **torch_options
    )
    return Lowering(lowered, costs, own)


def has_exact_kernels(device: torch.device) -> bool:
    """Whether an op gives the same bits in every run; on other devices some add up atomically."""
    return device.type == "cpu"


def planned_for(spec: DeviceSpec, device: torch.device, problem: Problem) -> str:
    """The note of a plan for a device that is not here, made on tensors of ``device``."""
    text = f"planned for {spec.name} on tensors of {device.type}"
    found = kernels_in(op.target for op in problem.ops)
    if spec.capability is None:
        return f"{text}: attention is the {device.type} kernel, and so is what it saves"
    if not found:
        return text
    kernels = ", ".join(f"{kernel} ({count})" for kernel, count in sorted(found.items()))
    return f"{text}: attention runs as on {spec.name}: {kernels}"
