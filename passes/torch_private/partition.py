"""Private torch: the joint graph's conventions, torch's own partition, AOTAutograd's hooks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as _boxed_nop
from torch._functorch._aot_autograd import descriptors as _descriptors
from torch._functorch.compile_utils import fx_graph_cse as _fx_graph_cse
from torch._functorch.partitioners import default_partition as _default_partition
from torch._functorch.partitioners import (
    min_cut_rematerialization_partition as _min_cut_partition,
)
from torch._guards import TracingContext, detect_fake_mode
from torch.utils.checkpoint import CheckpointPolicy as _CheckpointPolicy

from remat.solvers.errors import CaptureError

INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
"""Calls a region that torch compiles once (``torch.compiler.nested_compile_region``)."""

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
"""Node metadata: the tensor was stashed on ``ctx`` and is saved without a version check."""

_OPAQUE = tuple(
    found
    for found in (
        getattr(torch._library.fake_class_registry, "FakeScriptObject", None),
        getattr(torch, "ScriptObject", None),
    )
    if found is not None
)


def traced_in_backward(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The ops of a joint graph that AOTAutograd met while it differentiated.

    Those of forward are marked, those of a backward that the caller wrote (autograd.Function) may
    not be. Writes into inputs stand at the end, and say where they belong.
    """
    tags = [node.meta.get("partitioner_tag") for node in nodes]
    last = max((i for i, tag in enumerate(tags) if tag == "is_forward"), default=len(nodes))
    return frozenset(
        node
        for node, tag in zip(nodes[last + 1 :], tags[last + 1 :], strict=True)
        if node.op == "call_function" and tag != "must_be_in_forward"
    )


def check_marked(nodes: Sequence[fx.Node], output: fx.Node) -> None:
    """Refuse a joint graph that does not say what was traced in forward, and what outputs are.

    Raises:
        CaptureError: without either, writes into inputs and effects would be put in the wrong half.
    """
    if not any(node.meta.get("partitioner_tag") == "is_forward" for node in nodes):
        raise CaptureError(
            "the joint graph does not mark what was traced in forward (partitioner_tag), as "
            "AOTAutograd of torch 2.11 to 2.14 does: hand over the graph it made, as it was made"
        )
    if not output.meta.get("desc"):
        raise CaptureError(
            "the joint graph does not describe its outputs (meta['desc']), as AOTAutograd of torch "
            "2.11 to 2.14 does: hand over the graph it made, as it was made"
        )


def is_tangent(node: fx.Node) -> bool:
    """Whether the placeholder is a gradient that arrives when backward starts."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_primal(node: fx.Node) -> bool:
    """Whether the placeholder is an input of the forward."""
    return (
        node.op == "placeholder"
        and not is_tangent(node)
        and not any(mark in str(node.target) for mark in ("seed", "base_offset", "rng_state"))
        and type(node.meta.get("val")).__name__ != "BackwardState"
    )


def saves_generators(forward: fx.GraphModule) -> bool:
    """Whether torch keeps states of generators for ops in regions that the user checkpoints.

    It does so for all that may draw; attention without dropout is among them.
    """
    return any("rng_state" in str(node.target) for node in forward.graph.nodes)


def is_opaque(value: object) -> bool:
    """Whether a traced value is a script object rather than a tensor or a number."""
    return isinstance(value, _OPAQUE)


def mutated_input(output_desc: object) -> object | None:
    """The descriptor of the input that this forward output is the new content of, or None."""
    if isinstance(output_desc, _descriptors.InputMutationAOTOutput):
        return output_desc.mutated_input
    return None


def saved_desc(index: int, version_checked: bool) -> object:
    """The descriptor AOTAutograd gives to the ``index``-th saved tensor."""
    if not version_checked:
        return _descriptors.SavedForBackwardsNoVcCheckAOTOutput(index)
    return _descriptors.SavedForBackwardsAOTOutput(index)


def is_region(joint_inputs: Any) -> bool:
    """Whether a partition is asked for the body of a region, whose calls are part of a joint graph.

    AOTAutograd passes an empty list there, and a pair of primals and tangents elsewhere.
    """
    return isinstance(joint_inputs, list) and not joint_inputs


def fake_mode_of(*values: Any) -> Any:
    """The mode that the fake tensors among ``values`` were made in, as a context."""
    return detect_fake_mode(values) or contextlib.nullcontext()


def default_partition(
    joint: fx.GraphModule, joint_inputs: Any, num_forward_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's partition that saves everything backward reads."""
    return _default_partition(joint, joint_inputs, num_fwd_outputs=num_forward_outputs, **options)


def merge_common(joint: fx.GraphModule) -> None:
    """Merge ops that compute the same, as torch's partition for inductor does first."""
    joint.graph = _fx_graph_cse(joint.graph)


def min_cut_partition(
    joint: fx.GraphModule, joint_inputs: Any, num_forward_outputs: int, pinned: str, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's partition for inductor; ``joint`` is left as it is.

    Args:
        pinned: nodes with this metadata are saved, never computed again.
    """
    module = fx.GraphModule(joint, copy.deepcopy(joint.graph))
    for node in module.graph.nodes:
        if node.meta.get(pinned, None) is not None:
            node.meta["recompute"] = _CheckpointPolicy.MUST_SAVE
    return _min_cut_partition(
        module, joint_inputs, compiler="inductor", num_fwd_outputs=num_forward_outputs, **options
    )


def boxed(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A callable that takes its arguments in a list it empties: each dies at its last use."""
    return _boxed_nop(graph, list(example_inputs))


def aot_compile(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    compiler: Callable[..., Any] = boxed,
    inference_compiler: Callable[..., Any] = boxed,
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph with our partition and compilers.

    ``partition`` is not asked for the bodies of regions: torch's own serves, because
    :mod:`remat.passes.regions` puts them back into the joint graph.
    """

    def partition_whole(
        joint: fx.GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        split = _default_partition if is_region(joint_inputs) else partition
        return split(joint, joint_inputs, **options)

    def forward_compiler(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _keep_saved_tensors()
        return compiler(forward, inputs)

    aot = _aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=compiler,
        inference_compiler=inference_compiler,
        partition_fn=partition_whole,
    )
    return aot(graph, list(example_inputs))


def _keep_saved_tensors() -> None:
    """Have AOTAutograd forget which saved tensors backward might write into.

    Nothing here writes into one, and torch refuses ``retain_graph`` for a graph that has any.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
