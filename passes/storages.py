"""Which nodes share bytes: the storages of a joint graph.

Fake tensors keep the storage identity of the real ones, so two nodes alias exactly if their fake
values name the same storage. Every output of a multi-output op has a storage of its own: one id for
all of them makes peaks meaningless.

A node that a compiler inlines into its readers has no storage: like a view it lies in those of its
inputs, which have to be there when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from remat.passes import ops
from remat.passes.joint import JointGraph, is_getitem
from remat.solvers.errors import CaptureError


@dataclass
class Storages:
    """The storages of one joint graph; a storage is named by its index.

    Attributes:
        bytes: the size of each, rounded up to the allocator's granularity.
        creator: the node that allocates each (an op, a placeholder or a constant).
        holder: the node whose fresh instance is the storage: the creator, or the first getitem of
            it for an op with several outputs.
        held: for every node, the storages its value lies in.
        created: for every node, the storages it allocates.
        inlined: the nodes whose value is never stored.
    """

    bytes: list[int] = field(default_factory=list)
    creator: list[fx.Node] = field(default_factory=list)
    holder: list[fx.Node] = field(default_factory=list)
    held: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    created: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    inlined: frozenset[fx.Node] = frozenset()

    @staticmethod
    def of(
        joint: JointGraph,
        granularity: int = 1,
        device_type: str | None = None,
        inlined: frozenset[fx.Node] = frozenset(),
    ) -> Storages:
        """Read them off the fake values.

        Args:
            granularity: the allocator hands out multiples of this many bytes.
            device_type: count bytes on this kind of device only; None counts all.
            inlined: nodes whose value is never stored.
        """
        found = Storages(inlined=inlined)
        index: dict[int, tuple[int, ...]] = {}
        for node in joint.nodes:
            held: list[int] = []
            created: list[int] = []
            for tensor in tensors_of(node):
                storage = _storage(node, tensor)
                key = storage._cdata
                if key not in index and node in inlined:
                    read = (held for source in node.all_input_nodes for held in found.held[source])
                    index[key] = tuple(dict.fromkeys(read))
                elif key not in index:
                    index[key] = (len(found.bytes),)
                    created.append(len(found.bytes))
                    size = -(-storage.nbytes() // granularity) * granularity
                    elsewhere = device_type not in (None, tensor.device.type)
                    found.bytes.append(0 if elsewhere else size)
                    found.creator.append(node)
                    found.holder.append(node)
                held.extend(index[key])
            found.held[node] = tuple(dict.fromkeys(held))
            found.created[node] = tuple(created)
            if is_getitem(node):
                found._hold(node)
        return found

    def is_alias(self, node: fx.Node) -> bool:
        """Whether the node allocates nothing: a view, a getitem, an in-place op, an inlined one."""
        return not self.created[node]

    def _hold(self, node: fx.Node) -> None:
        source = node.args[0]
        for storage in self.held[node]:
            if self.creator[storage] is source and self.holder[storage] is source:
                self.holder[storage] = node


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors a node's value consists of."""
    value = node.meta.get("val")
    return [item for item in ops.parts_of(value) if isinstance(item, torch.Tensor)]


def _storage(node: fx.Node, tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise CaptureError(
            f"{node.name} is a {tensor.layout} tensor ({type(tensor).__name__}), which has no "
            "single storage; this version plans dense tensors"
        ) from error


def main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device that holds most bytes of ``tensors``; the CPU if there are none."""
    held: dict[torch.device, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        held[tensor.device] = held.get(tensor.device, 0) + size
    return max(held, key=lambda device: held[device], default=torch.device("cpu"))
