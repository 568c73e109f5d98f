"""What of a graph cannot be recorded in a CUDA graph, and where it is.

A CUDA graph records kernels with their arguments: addresses and numbers. What happens on the host
between them happens once, while it is recorded. So a recorded graph must not wait for the device
(a host sync), compute on the host, have sizes that change, or draw from a generator that the
recording does not know; torch registers the default generator of the device by itself.

The pass reads fake values, so it needs no GPU; ``device_type`` says what the tensors of the graph
stand for. What is found was checked against torch's own list (``FORBIDDEN_CUDAGRAPH_OPS`` and the
tag ``cudagraph_unsafe``, which inductor splits its graphs at) and "Constraints" in torch's notes
on CUDA graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import fx

from remat.passes import layers, ops, runtime
from remat.passes import transfers as _transfers  # noqa: F401  it registers the ops
from remat.solvers.errors import CaptureError

Kind = Literal["host sync", "host", "device", "dynamic shape", "random"]

_MASKS: Final = (torch.bool, torch.uint8)
_INDEXED: Final = frozenset(
    {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index",
        "aten::_unsafe_index_put",
    }
)  # fmt: skip
_SYNCS: Final = {
    # Tags of torch say it of most; these have none.
    "aten::is_nonzero": "reads a number out of a tensor",
    "aten::_assert_scalar": "checks a number on the host",
    "aten::_linalg_check_errors": "reads an error code out of a tensor",
    "aten::multinomial": "checks the probabilities on the host",
    "aten::embedding_renorm_": "counts indices on the host",
    "aten::_linalg_eig": "computes on the host",
    "aten::linalg_eig": "computes on the host",
    "aten::_fused_moving_avg_obs_fq_helper": "is on torch's list of ops that cannot be recorded",
    "aten::_fused_moving_avg_obs_fq_helper_functional": (
        "is on torch's list of ops that cannot be recorded"
    ),
}
# Synchronize under torch.use_deterministic_algorithms, by torch's own list.
_DETERMINISTIC: Final = frozenset(
    {
        "aten::_unsafe_index_put", "aten::_unsafe_masked_index_put_accumulate", "aten::index_put",
        "aten::index_put_", "aten::scatter", "aten::scatter_add", "aten::scatter_add_",
        "aten::scatter_reduce", "aten::scatter_reduce_",
    }
)  # fmt: skip
_BRANCHES: Final = frozenset({"cond", "while_loop", "while_loop_stack_output"})
_STATES: Final = frozenset({"run_and_save_rng_state", "run_with_rng_state"})
_TRANSFERS: Final = (
    torch.ops.remat.offload,
    torch.ops.remat.wait_offload,
    torch.ops.remat.reload,
    torch.ops.remat.wait_reload,
)
_RUNTIME: Final = (runtime.random_state, runtime.replay_random)


@dataclass(frozen=True)
class Obstacle:
    """One node that cannot be recorded.

    Attributes:
        kind: what about it.
        node, target: its name, and what it calls.
        layer, source: module and source line, as far as they are known.
        why: what it does.
        advice: what to do about it.
    """

    kind: Kind
    node: str
    target: str
    layer: str
    source: str
    why: str
    advice: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.layer, self.source))) or "an unknown line"
        return f"{self.kind}: {self.target} ({where}) {self.why}; {self.advice}"


def capture_safe(
    module: fx.GraphModule,
    *,
    device_type: str = "cuda",
    generators: Collection[object] = (),
    deterministic: bool | None = None,
) -> tuple[Obstacle, ...]:
    """All that keeps ``module`` from being recorded, in program order; empty if nothing does.

    Args:
        device_type: where the tensors are that will be on the device; ``"cpu"`` for a graph traced
            on the CPU to be planned for a GPU.
        generators: generators that the recording registers beside the default one.
        deterministic: whether deterministic algorithms are on; None: as they are now.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    nodes = (node for node in module.graph.nodes if node.op != "output")
    devices = (tensor.device for node in nodes for tensor in _tensors(node))
    first = next((device for device in devices if device.type == device_type), None)
    check = _Check(device_type, tuple(generators), deterministic, first)
    layer_of = layers.layers(module.graph.nodes)
    found: list[Obstacle] = []
    for node in module.graph.nodes:
        for kind, why, advice in check.of(node):
            target = _python_name(node) or str(node.target)
            source = layers.source_line(node)
            found.append(
                Obstacle(kind, node.name, target, layer_of.get(node, ""), source, why, advice)
            )
    return tuple(found)


def refuse_obstacles(obstacles: tuple[Obstacle, ...]) -> None:
    """Raise if there are any.

    Raises:
        CaptureError: each of them in a line of its own, ten at most.
    """
    if not obstacles:
        return
    lines = [f"  {obstacle}" for obstacle in obstacles[:10]]
    if len(obstacles) > 10:
        lines.append(f"  and {len(obstacles) - 10} more")
    raise CaptureError(
        "the graph cannot be recorded as a CUDA graph:\n" + "\n".join(lines) + "\nWithout these it "
        'can; executor="eager" and executor="inductor" run it as it is'
    )


_Finding = tuple[Kind, str, str]


@dataclass(frozen=True)
class _Check:
    device_type: str
    generators: tuple[object, ...]
    deterministic: bool
    first: torch.device | None

    def of(self, node: fx.Node) -> Iterator[_Finding]:
        """What is wrong with the node, beginning with what explains the rest."""
        for tensor in _tensors(node) if node.op in ("placeholder", "call_function") else ():
            if tensor.device.type == self.device_type and tensor.device != self.first:
                why = f"lies on {tensor.device}, and what comes before on {self.first}"
                yield "device", why, "a graph records the work of one device: keep the step on one"
                return
        if node.op == "placeholder":
            yield from self._placeholder(node)
            return
        if node.op != "call_function":
            return
        syncs = list(self._syncs(node))
        yield from syncs or self._sizes(node)
        yield from self._devices(node)
        yield from self._random(node)
        for inner in ops.body_nodes(node):
            yield from self.of(inner)

    def _placeholder(self, node: fx.Node) -> Iterator[_Finding]:
        yield from self._sizes(node)
        if all(_is_transfer(user) for user in node.users):
            return  # a token: a name for a place, which the recording keeps
        for tensor in _tensors(node):
            if self._is_elsewhere(tensor) and node.users:
                number = tensor.ndim == 0
                yield (
                    "host",
                    f"is a {'number' if number else 'tensor'} on the {tensor.device.type}",
                    f"what is recorded would be its content now: {_ON_DEVICE}",
                )

    def _syncs(self, node: fx.Node) -> Iterator[_Finding]:
        name, tags = ops.schema_name(node), _tags(node)
        if name in _SYNCS:
            yield "host sync", _SYNCS[name], _KEEP_ON_DEVICE
        elif name in _INDEXED:
            if any(tensor.dtype in _MASKS for tensor in _indices(node)):
                why = "indexes by a mask, so that the host has to count its elements"
                yield "host sync", why, "use torch.where, or indices of a fixed number"
        elif torch.Tag.data_dependent_output in tags:
            yield "host sync", "reads a number out of a tensor", _KEEP_ON_DEVICE
        elif torch.Tag.dynamic_output_shape in tags:
            why = "has a result whose size depends on data, which the host has to read"
            yield "dynamic shape", why, "pad to a fixed size (nonzero_static, torch.where)"
        elif torch.Tag.cudagraph_unsafe in tags:
            yield "host sync", "is tagged by its author as not to be recorded", _OTHER_OP
        if self.deterministic and name in _DETERMINISTIC:
            yield (
                "host sync",
                "waits for the device under deterministic algorithms",
                "turn torch.use_deterministic_algorithms off, or use another op",
            )
        if ops.schema_name(node) == "" and _python_name(node) in _BRANCHES:
            why = "chooses on the host what to run next"
            yield "host sync", why, "compute both branches and choose by torch.where"

    def _sizes(self, node: fx.Node) -> Iterator[_Finding]:
        for item in ops.parts_of(node.meta.get("val")):
            sizes = item.shape if isinstance(item, torch.Tensor) else (item,)
            if any(isinstance(size, torch.SymInt) for size in sizes):
                yield "dynamic shape", "has a dynamic size", "compile with dynamic=False"
                return
            if isinstance(item, torch.Tensor) and item.layout is not torch.strided:
                yield "dynamic shape", f"makes a {item.layout} tensor", "use a dense one"
                return

    def _devices(self, node: fx.Node) -> Iterator[_Finding]:
        if _is_transfer(node):
            return  # pinned memory that stays where it is, copied on a stream of the recording
        made = [tensor for tensor in _tensors(node) if self._is_elsewhere(tensor)]
        given = [t for source in node.all_input_nodes for t in _tensors(source)]
        here = [tensor for tensor in given if not self._is_elsewhere(tensor)]
        if made and (here or not given):
            yield "host", f"makes a tensor on the {made[0].device.type}", _ON_DEVICE
        elif made and not ops.is_view(node):
            yield "host", f"computes on the {made[0].device.type}", _ON_DEVICE
        elif not made and _tensors(node) and given and not here:
            why = "copies from host memory, which is read once only"
            yield "host", why, "copy before the step, into a tensor that stays"

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type not in (self.device_type, "meta")

    def _random(self, node: fx.Node) -> Iterator[_Finding]:
        if node.target in _RUNTIME or _python_name(node) in _STATES:
            why = "sets or reads the state of a generator from the host"
            yield "random", why, "keep what random ops make, instead of drawing again"
            return
        given = _generator(node)
        if given is None or not ops.is_random(node):
            return
        if not any(given is known for known in self.generators):
            why = "draws from a generator that the recording does not know"
            yield "random", why, "draw from a generator of the device"


_KEEP_ON_DEVICE: Final = "keep the value in a tensor on the device, or take it out of the step"
_ON_DEVICE: Final = "put it on the device (an optimizer's: capturable=True)"
_OTHER_OP: Final = "use another op, or take it out of the step"


def generators_in(module: fx.GraphModule, device_type: str) -> tuple[torch.Generator, ...]:
    """The generators of a device that a graph is given to draw from: a recording registers them."""
    given = map(_generator, module.graph.nodes)
    found = (g for g in given if isinstance(g, torch.Generator) and g.device.type == device_type)
    return tuple({id(generator): generator for generator in found}.values())


def _generator(node: fx.Node) -> object:
    given = node.kwargs.get("generator")
    if isinstance(given, fx.Node) and given.op == "get_attr":
        owner = node.graph.owning_module
        return operator.attrgetter(str(given.target))(owner) if owner is not None else given
    return given


def _is_transfer(node: fx.Node) -> bool:
    op = ops.overload(node)
    return op is not None and op.overloadpacket in _TRANSFERS


def _tags(node: fx.Node) -> Collection[Any]:
    op = ops.overload(node)
    return () if op is None else op.tags


def _python_name(node: fx.Node) -> str:
    return "" if ops.overload(node) else str(getattr(node.target, "__name__", node.target))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in ops.parts_of(node.meta.get("val")) if isinstance(t, torch.Tensor)]


def _indices(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors an op indexes by."""
    given = node.kwargs.get("indices", node.args[1] if len(node.args) > 1 else ())
    for item in ops.parts_of(given):
        if isinstance(item, fx.Node):
            yield from _tensors(item)
