"""Which values a fusing compiler never stores, and which ops share a kernel.

Read off the joint graph before anything is compiled, by the rules of inductor's lowering
(``torch/_inductor/graph.py``, ``run_node``; ``ir.py``, ``StorageBox.should_realize_on_reuse``):

* a pointwise value is *inlined* into whoever reads it. It is stored only if a library call reads it
  or it is an output, if inlining would make its readers read too many values or grow too large, or
  if backward needs it and it is smaller than what it is computed from;
* a reduction is stored, its inputs are inlined;
* a library call (matrix product, convolution, attention, anything without a lowering) reads and
  writes stored values;
* generated ops that touch a common value share a *kernel*, unless a library call lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import fx

from remat.passes import ops
from remat.passes.joint import JointGraph, is_getitem
from remat.passes.mutation import SNAPSHOT
from remat.passes.storages import Storages, tensors_of

Kind = Literal["pointwise", "reduction", "generated", "library"]

# Without the tag of pointwise ops, though each element is computed by itself.
_ELEMENTWISE: Final = frozenset(
    {
        "aten::full", "aten::full_like", "aten::zeros_like", "aten::ones_like", "aten::arange",
        "aten::scalar_tensor", "prims::iota", "aten::embedding", "aten::index",
        "aten::_unsafe_index", "aten::gather", "aten::constant_pad_nd", "aten::repeat",
        "aten::flip", "prims::rev", "aten::roll", "aten::slice_scatter", "aten::select_scatter",
        "aten::upsample_nearest2d", "prims::inductor_random", "prims::inductor_lookup_seed",
        "prims::inductor_randint", "prims::convert_element_type", "prims::fma", "aten::empty",
    }
)  # fmt: skip
# Of the first tensor they read no more than they write.
_GATHERS: Final = frozenset(
    {"aten::embedding", "aten::index", "aten::_unsafe_index", "aten::gather"}
)
_REDUCTIONS: Final = frozenset(
    {
        "aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::var",
        "aten::any", "aten::all", "aten::argmax", "aten::argmin", "aten::prod", "aten::max",
        "aten::min", "prims::xor_sum",
    }
)  # fmt: skip
# Reads, and operations, beyond which inductor stores a value with several readers, and any value.
_SHARED_READS: Final = 4
_ANY_READS: Final = {"cpu": 12}
_ANY_READS_ELSEWHERE: Final = 8
_SHARED_OPERATIONS: Final = {"cpu": 50}
_SHARED_OPERATIONS_ELSEWHERE: Final = 30
_ANY_OPERATIONS: Final = 100
# Storing a value that is not stored otherwise takes time: it must save this many times its bytes.
_WORTH_KEEPING: Final = 1.25


@dataclass(frozen=True)
class Fusion:
    """How a joint graph is expected to fuse.

    Attributes:
        kinds: what each op node becomes.
        inlined: nodes whose value is never stored.
        reads: for every node, bytes it reads of each stored value, inlined inputs followed to what
            they are computed from; a value is named by the node that creates it.
        operations: for every node, the nodes inlined into it, itself included.
        kernel: for every generated node that is stored, its kernel.
    """

    kinds: Mapping[fx.Node, Kind]
    inlined: frozenset[fx.Node]
    reads: Mapping[fx.Node, Mapping[fx.Node, int]]
    operations: Mapping[fx.Node, tuple[fx.Node, ...]]
    kernel: Mapping[fx.Node, int]


def fuse(
    joint: JointGraph,
    is_library_call: Callable[[fx.Node], bool],
    is_kept: Callable[[fx.Node], bool] = lambda _: False,
) -> Fusion:
    """Tell how a compiler fuses the ops of ``joint``.

    Args:
        is_library_call: whether an op has no generated code (see ``torch_private.lowerings``).
        is_kept: whether an op of forward is to be stored, if backward reads it.
    """
    return _Fuser(joint, is_library_call, is_kept).run()


class _Fuser:
    def __init__(
        self,
        joint: JointGraph,
        is_library_call: Callable[[fx.Node], bool],
        is_kept: Callable[[fx.Node], bool],
    ) -> None:
        self.joint = joint
        self.is_kept = is_kept
        self.storages = Storages.of(joint)
        self.kinds = {
            node: _kind(node, is_library_call)
            for node in joint.nodes
            if node.op == "call_function" and not self._is_passive(node)
        }
        self.outputs = {
            storage
            for node in (*joint.forward_outputs, *joint.backward_outputs)
            if isinstance(node, fx.Node)
            for storage in self.storages.held[node]
        }
        self.inlined: set[fx.Node] = set()
        self.reads: dict[fx.Node, dict[fx.Node, int]] = {}
        self.operations: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def run(self) -> Fusion:
        for node in self.joint.nodes:
            self._follow(node)
            if self.kinds.get(node) == "pointwise" and self._is_inlined(node):
                self.inlined.add(node)
        kernel = _kernels(self.joint, self.kinds, self.inlined, self.reads)
        return Fusion(self.kinds, frozenset(self.inlined), self.reads, self.operations, kernel)

    def _is_passive(self, node: fx.Node) -> bool:
        return is_getitem(node) or (
            self.storages.is_alias(node) and not ops.has_effect(node) and not ops.is_random(node)
        )

    def _follow(self, node: fx.Node) -> None:
        """What the node reads, and what is computed on the way, once its inputs are known."""
        reads: dict[fx.Node, int] = {}
        operations: dict[fx.Node, None] = {}
        for source in node.all_input_nodes:
            if self._inlines(source):
                found = self.reads[source]
                operations.update(dict.fromkeys(self.operations[source]))
            else:
                found = {
                    self.storages.creator[s]: _bytes(source) for s in self.storages.held[source]
                }
            for creator, size in found.items():
                reads[creator] = max(reads.get(creator, 0), size)
        if ops.schema_name(node) in _GATHERS:
            for creator in self.reads_of_table(node):
                reads[creator] = min(reads[creator], _bytes(node))
        if node in self.kinds:
            operations[node] = None
        self.reads[node], self.operations[node] = reads, tuple(operations)

    def reads_of_table(self, node: fx.Node) -> list[fx.Node]:
        """What the table of a gather is stored in, if it is stored."""
        table = node.args[0]
        if not isinstance(table, fx.Node) or self._inlines(table):
            return []
        return [self.storages.creator[storage] for storage in self.storages.held[table]]

    def _inlines(self, node: fx.Node) -> bool:
        """Whether the node is inlined, or a view of one that is."""
        return any(self.storages.creator[s] in self.inlined for s in self.storages.held[node])

    def _is_inlined(self, node: fx.Node) -> bool:
        if SNAPSHOT in node.meta or set(self.storages.created[node]) & self.outputs:
            return False
        readers = self._readers(node)
        if any(self.kinds.get(reader) == "library" for reader in readers):
            return False
        forward = sum(self.joint.phases[reader] == "forward" for reader in readers)
        if forward < len(readers) and self.joint.phases[node] != "backward" and self.is_kept(node):
            return False
        shared = max(forward, len(readers) - forward) > 1
        reads, operations = len(self.reads[node]), len(self.operations[node])
        device = next((tensor.device.type for tensor in tensors_of(node)), "cpu")
        if reads > _ANY_READS.get(device, _ANY_READS_ELSEWHERE) or operations > _ANY_OPERATIONS:
            return False
        most = _SHARED_OPERATIONS.get(device, _SHARED_OPERATIONS_ELSEWHERE)
        if shared and (reads > _SHARED_READS or operations > most):
            return False
        return not self._is_worth_keeping(node, needed_late=forward < len(readers))

    def _is_worth_keeping(self, node: fx.Node, *, needed_late: bool) -> bool:
        """Whether saving the value takes less than saving what it is computed from."""
        if not needed_late or self.joint.phases[node] != "forward":
            return False
        computed = [
            creator for creator in self.reads[node] if creator.op not in ("placeholder", "get_attr")
        ]
        return bool(computed) and sum(map(_bytes, computed)) > _WORTH_KEEPING * _bytes(node)

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user.op == "call_function" and self._is_passive(user):
                pending.extend(user.users)
            elif user.op == "call_function":
                found[user] = None
        return list(found)


def _kind(node: fx.Node, is_library_call: Callable[[fx.Node], bool]) -> Kind:
    op = ops.overload(node)
    if op is None or ops.has_effect(node) or ops.is_random(node):
        return "library"
    if op._schema.name in _ELEMENTWISE:
        return "pointwise"
    if is_library_call(node):
        return "library"
    if op._schema.name in _REDUCTIONS:
        return "reduction"
    single = isinstance(node.meta.get("val"), torch.Tensor)
    return "pointwise" if torch.Tag.pointwise in op.tags and single else "generated"


def _kernels(
    joint: JointGraph,
    kinds: Mapping[fx.Node, Kind],
    inlined: set[fx.Node],
    reads: Mapping[fx.Node, Mapping[fx.Node, int]],
) -> dict[fx.Node, int]:
    """Number the kernels: generated ops between the same library calls that share a value."""
    calls_before: dict[fx.Node, int] = {}
    kernel: dict[fx.Node, int] = {}
    kernel_at: dict[tuple[str, int, fx.Node], int] = {}
    for node in joint.nodes:
        calls_before[node] = max(
            (
                calls_before[source] + (kinds.get(source) == "library")
                for source in node.all_input_nodes
            ),
            default=0,
        )
        if node not in kinds or kinds[node] == "library" or node in inlined:
            continue
        place = (joint.phases[node], calls_before[node])
        touched = [(*place, creator) for creator in (*reads[node], node)]
        kernel[node] = next((kernel_at[t] for t in touched if t in kernel_at), len(kernel))
        kernel_at.update((t, kernel[node]) for t in touched)
    return kernel


def _bytes(node: fx.Node) -> int:
    """Distinct bytes of the node's tensors; expanded dimensions count once."""
    total = 0
    for tensor in tensors_of(node):
        size = tensor.element_size()
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size *= length if stride != 0 or length == 0 else 1
        total += size
    return total
