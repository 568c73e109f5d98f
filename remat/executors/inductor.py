"""The inductor executor: one Dynamo graph compiled by inductor, in the halves remat chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from remat.executors.wrapper_run import Generated, TensorSpec
from remat.solvers.errors import RematError

if TYPE_CHECKING:
    from remat.passes.torch_private.inductor import CompiledHalf

PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

AS_PLANNED: Final[dict[str, Any]] = {"layout_optimization": False}
"""Options under which a planned graph on a CPU stores what the plan says, and no more.

Inductor runs convolutions channels last there, and hands its copies of weights and images to
backward in place of the originals: 4.4 MiB beside the 14.0 that the plan of a small ResNet keeps.
Without, the replayed peak was 15.89 MiB for a plan of 15.89; with, 19.61.
"""

FREE_EARLY: Final[dict[str, Any]] = {"allow_buffer_reuse": False}
"""Options under which a planned graph holds nothing that nobody reads.

Inductor keeps a buffer that is done with until another of its size is wanted, as long as its own
estimate of the peak allows it; that estimate is not the true peak. Under the least-peak plan of a
4-layer transformer with a cross-entropy loss, buffers so kept lifted the peak from 16.09 to 17.69
MiB. Writing into an input that is read for the last time is another option (``inplace_buffers``),
and stays on.

Reordering found nothing more: inductor keeps the order in which the backward graph was emitted.
With early frees the peak was 16.09 MiB whether ``reorder_for_peak_memory`` was on or off, and
whether the scheduler's nodes were sorted by emitted order or not.
"""


IN_ORDER: Final[dict[str, Any]] = {"reorder_for_peak_memory": False}
"""Options under which a planned graph that offloads copies while it computes.

Inductor's reordering puts what frees memory early and what allocates late: every wait for an
offload right behind its start, every reload right before its wait.
"""


@dataclass(frozen=True)
class InductorGraph:
    """What compiling one graph gave.

    Attributes:
        run: the compiled step, called as the Dynamo graph was.
        partitioned: whether ``partition`` was called. If not, the whole step came from
            AOTAutograd's cache, compiled for the same graph and key before, and the halves are
            not known.
        forward, backward: the halves as generated; None where not known.
        inference: the graph as generated, if nothing in it trains.
    """

    run: Callable[..., Any]
    partitioned: bool
    forward: Generated | None
    backward: Generated | None
    inference: Generated | None

    @property
    def from_cache(self) -> bool:
        """The step was compiled earlier and nothing is known of its halves."""
        return not self.partitioned and self.inference is None


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partition: PartitionFunction,
    key: str,
    inductor_options: Mapping[str, Any] | None = None,
    donate: bool = False,
    hold_apart: bool = False,
) -> InductorGraph:
    """Compile one Dynamo graph with inductor; ``graph`` is left as it is.

    Args:
        partition: called with the joint graph, its inputs, ``num_fwd_outputs`` and
            ``static_lifetime_input_indices``, after inductor's passes over the joint graph.
        key: all that the partition depends on beside the graph (version, budget, solver, device,
            resident bytes); inductor's caches, in this process and on disk, go by it.
        inductor_options: what ``torch.compile(options=...)`` takes.
        donate: let backward write into saved tensors, as stock torch does; forbids
            ``retain_graph``.
        hold_apart: fuse no two ops that a library call lies between, so that what is computed a
            second time late is not computed early.

    Raises:
        InvalidOption: an option inductor does not have, or that remat sets itself.
    """
    # Importing inductor takes eight seconds; who runs the eager executor does not pay them.
    from remat.passes.torch_private import inductor as private

    options = private.check_options(inductor_options or {})
    seen = _Seen(partition)
    run = private.compile_with_partition(
        graph,
        example_inputs,
        partitioner=private.Partitioner(seen.split, f"{key} donate={donate} apart={hold_apart}"),
        options=options,
        donate=donate,
        hold_apart=hold_apart,
        on_compiled=seen.compiled,
    )
    return InductorGraph(
        run,
        partitioned=seen.partitioned,
        forward=seen.halves.get("forward"),
        backward=seen.halves.get("backward"),
        inference=seen.halves.get("inference"),
    )


@dataclass(eq=False)
class _Seen:
    """What happens while inductor compiles one step."""

    partition: PartitionFunction
    partitioned: bool = False
    halves: dict[str, Generated] = field(default_factory=dict)

    def split(
        self, joint: fx.GraphModule, joint_inputs: Any, **torch_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Call ``partition``, and remember that it was called."""
        self.partitioned = True
        return self.partition(joint, joint_inputs, **torch_options)

    def compiled(self, half: CompiledHalf) -> None:
        """Take what was generated for one half.

        Raises:
            RematError: there is one of that kind already.
        """
        if half.kind in self.halves:
            raise RematError(
                f"inductor compiled two {half.kind} graphs for one step; nested graphs "
                "(invoke_subgraph) are not in this version"
            )
        self.halves[half.kind] = _generated(half)


def _generated(half: CompiledHalf) -> Generated:
    specs = tuple(_spec(name, value) for name, value in zip(half.names, half.inputs, strict=True))
    return Generated(half.kind, half.source, specs, half.copied)  # type: ignore[arg-type]


def _spec(name: str, value: Any) -> TensorSpec | None:
    if not isinstance(value, torch.Tensor):
        return None
    size = value.element_size()
    return TensorSpec(
        name=name,
        shape=tuple(int(length) for length in value.shape),
        stride=tuple(int(step) for step in value.stride()),
        dtype=value.dtype,
        device=value.device,
        offset=int(value.storage_offset()),
        extent=int(value.untyped_storage().nbytes()) // size,
        tangent="tangents" in name,
    )
