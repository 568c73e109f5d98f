"""What every op of a graph costs on a device: seconds, FLOPs, workspace.

Three ways to tell seconds:

* ``roofline``: max(FLOPs / matrix rate, bytes moved / bandwidth) + launch (Williams, Waterman,
  Patterson 2009). Needs no device.
* ``measured``: the op is run. An op that cannot be falls back on the roofline, and is listed.
* ``flops``: FLOPs / matrix rate, and bytes only to break ties: for comparison with work that
  counts FLOPs.

Workspaces are measured in each of them where the device is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import fx

from remat.cost.device import DeviceSpec
from remat.cost.flops import WrappedCall, node_flops, wrapped_call
from remat.cost.profile import OpProfile, Profiler, tensors_of
from remat.passes.costs import OpCost
from remat.passes.joint import is_getitem
from remat.passes.ops import is_view, returns_nothing
from remat.solvers.errors import InvalidOption

Mode = Literal["roofline", "measured", "flops"]

# Weight of the bytes in the mode that counts FLOPs: it decides between ops without any.
TIE_BREAK: Final = 1e-6
# Of the first tensor they read no more than they write: rows that the indices name.
_READ_ROWS: Final = frozenset(
    {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}
)


class CostModel:
    """Costs of graph nodes on ``device``.

    Args:
        device: from :func:`remat.cost.device.find_device`.
        mode: how seconds are told; see above.
        run: run ops to measure them. False runs and allocates nothing, and uses what was measured
            before.

    Attributes:
        unmeasured: node name → why its workspace is assumed, for all nodes asked for so far.

    Raises:
        InvalidOption: the mode is unknown, or asks for measuring on a device that is not here.
    """

    def __init__(self, device: DeviceSpec, mode: Mode = "roofline", *, run: bool = True) -> None:
        if mode not in get_args(Mode):
            raise InvalidOption(f"cost mode {mode!r} is not one of {', '.join(get_args(Mode))}")
        if mode == "measured" and device.torch_device is None:
            raise InvalidOption(
                f"cost mode 'measured' needs the device, and {device.name} is only described; "
                "use 'roofline'"
            )
        self.device = device
        self.mode = mode
        self.run = run
        self.unmeasured: dict[str, str] = {}
        self._profiler: Profiler | None = None
        if device.torch_device is not None:
            self._profiler = Profiler(torch.device(device.torch_device), device.granularity)

    def costs(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, OpCost]:
        """The cost of each node; views, getitems and whatever is no call cost nothing.

        May be called while a graph is being traced: ops run outside of all modes, on data of
        their own, and the random generators are left as they were.
        """
        found = {node: OpCost(seconds=0.0) for node in nodes}
        working = [node for node in nodes if does_work(node)]
        profiles = self._profiles(working)
        for node in working:
            profile = profiles[node]
            if profile.failure is not None:
                self.unmeasured[node.name] = profile.failure
            flops = node_flops(node)
            found[node] = OpCost(
                seconds=self._seconds(node, flops, profile),
                flops=flops,
                workspace=0 if profile.failure else profile.workspace,
                assumed=profile.failure is not None,
                retained=profile.retained,
            )
        return found

    def _profiles(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, OpProfile]:
        if self._profiler is None:
            absent = OpProfile(failure=f"{self.device.name} is only described, not here")
            return dict.fromkeys(nodes, absent)
        timed = self.mode == "measured"
        not_run = OpProfile(failure="it was not run")
        profiles = self._profiler.profiles(nodes, timed=timed, run=self.run)
        return {node: profile or not_run for node, profile in profiles.items()}

    def _seconds(self, node: fx.Node, flops: int, profile: OpProfile) -> float:
        if self.mode == "measured" and profile.failure is None and profile.seconds is not None:
            return profile.seconds
        call = wrapped_call(node)
        computing = flops / self.device.matrix_rate(_dtype(call))
        moving = bytes_moved(call) / self.device.bandwidth
        if self.mode == "flops":
            return computing + TIE_BREAK * moving
        return max(computing, moving) + self.device.launch


def does_work(node: fx.Node) -> bool:
    """Whether the node is a call that computes: no view, no getitem, no mere assertion."""
    # An assertion run on made-up data fails, and on CUDA ends the process.
    passive = is_getitem(node) or is_view(node) or returns_nothing(node)
    return node.op == "call_function" and not passive


def bytes_moved(call: WrappedCall) -> int:
    """Bytes read and written by an op that reads each input once and writes each output once.

    Expanded dimensions are read once; of a table only the rows that are looked up.
    """
    inputs = {
        id(tensor): _distinct_bytes(tensor) for tensor in tensors_of((call.args, call.kwargs))
    }
    written = sum(_distinct_bytes(tensor) for tensor in tensors_of(call.result))
    if _schema_name(call.target) in _READ_ROWS and call.args:
        inputs[id(call.args[0])] = min(inputs.get(id(call.args[0]), 0), written)
    return sum(inputs.values()) + written


def _distinct_bytes(tensor: torch.Tensor) -> int:
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return int(count.node.hint) if isinstance(count, torch.SymInt) else count


def _dtype(call: WrappedCall) -> torch.dtype:
    """That of the first tensor: matrix products have operands of one dtype."""
    return next((tensor.dtype for tensor in tensors_of(call.args)), torch.float32)


def _schema_name(target: Any) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
