"""One captured graph, split by many schedules: each pair of graphs computes what torch's own does.

Capturing a program takes a second, splitting and running it a few hundredths: this tries schedules
where ``remat.compile`` would try one. Graphs of the inductor executor (its decompositions, writes
into inputs inside the graph, seeds, values that are never stored) are run op by op too, so that
generating and compiling code, tens of seconds a graph, is left to a few tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from remat.passes.apart import hold_products
from remat.passes.costs import OpCost
from remat.passes.fusion import fuse
from remat.passes.joint import JointGraph
from remat.passes.lower import Lowered, lower, op_nodes
from remat.passes.mutation import pin_mutated_reads
from remat.passes.offload import Place
from remat.passes.overwrite import overwrite_inputs
from remat.passes.regions import inline_regions
from remat.passes.split import split
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.passes.verify import verify_split
from remat.solvers.problem import Link
from remat.solvers.schedule import Schedule
from remat.solvers.simulate import simulate
from tests.models.compare import differences

Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass
class Recorded:
    """One graph as it was first called.

    Attributes:
        primals: copies of what forward was given.
        own: torch's own two graphs.
    """

    lowered: Lowered
    own: Graphs
    executor: str = "eager"
    primals: list[Any] = field(default_factory=list)

    def run(self, graphs: Graphs) -> dict[str, Any]:
        """Forward and backward on copies of the recorded inputs: all they compute or write."""
        joint = self.lowered.joint
        torch.manual_seed(5)
        primals = [_copy(item) for item in self.primals]
        with torch.no_grad():
            returned = list(_run(graphs[0], primals))
            outputs = [_copy(item) for item in returned[: joint.num_forward_outputs]]
            saved = returned[joint.num_forward_outputs :]
            del returned
            tangents = [_random_like(node.meta["val"]) for node in joint.tangents]
            gradients = _run(graphs[1], [*saved, *tangents])
        return {
            "outputs": outputs,
            "gradients": list(gradients),
            "primals": primals,
            "rng": torch.get_rng_state(),
        }

    def check(
        self, schedule: Schedule, place: Place | None = None, link: Link | None = None
    ) -> None:
        """Hold the graphs of ``schedule`` to torch's own.

        Args:
            place, link: where it offloads to, if it does.
        """
        simulate(self.lowered.problem, schedule, link)
        graphs = split(self.lowered, schedule, place)
        verify_split(self.lowered, schedule, *graphs)
        if self.executor == "inductor":
            hold_products(graphs[1].graph)
        assert differences(self.run(self.own), self.run(graphs)) == []


def record(function: Callable[..., Any], *args: Any, executor: str = "eager") -> list[Recorded]:
    """Call ``function`` once, compiled by torch's own partition; its graphs that train."""
    found: list[Recorded] = []

    def partition(
        module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> Graphs:
        lowered = _lower(module, num_fwd_outputs, executor)
        options.pop("compiler", None)
        own = private.default_partition(module, inputs, num_fwd_outputs, **options)
        found.append(Recorded(lowered, own, executor))
        return own

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        def call(given: list[Any]) -> Any:
            if not found[-1].primals:
                found[-1].primals = [_copy(item) for item in given]
            taken = list(given)
            given.clear()
            return _run(graph, taken)

        call._boxed_call = True  # type: ignore[attr-defined]  AOTAutograd then passes a list
        return call

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if executor == "inductor":
            return _through_inductor(graph, inputs, partition, compiler)
        return private.aot_compile(graph, inputs, partition=partition, compiler=compiler)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*args)
    return found


def _lower(module: fx.GraphModule, outputs: int, executor: str) -> Lowered:
    """The problem as :mod:`remat.lowering` makes it, at a made-up cost."""
    if executor == "inductor":
        inline_regions(module)
        private.merge_common(module)
    joint = pin_mutated_reads(JointGraph.make(module, outputs))
    if executor == "eager":
        storages = Storages.of(joint)
        costs = {node: OpCost(1e-6) for node in op_nodes(joint, storages)}
        return lower(joint, storages, costs)
    from remat.passes.torch_private.lowerings import is_library_call

    fusion = fuse(joint, is_library_call)
    storages = Storages.of(joint, 1, "cpu", fusion.inlined)
    costs = {node: OpCost(1e-6) for node in op_nodes(joint, storages)}
    lowered = lower(joint, storages, costs, replays_random=False)
    return overwrite_inputs(lowered, fusion, donated=False)


def _through_inductor(graph: fx.GraphModule, inputs: Any, partition: Any, compiler: Any) -> Any:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from remat.passes.torch_private.inductor import Partitioner

    patches = {"custom_partitioner_fn": Partitioner(partition, "recorded"), "fx_graph_cache": False}
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(graph, inputs, inner_compile=compiler, config_patches=patches)


class _Ops(fx.Interpreter):
    """Runs ops one by one, drawing from a seed what inductor's kernels would draw from it."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        prims = torch.ops.prims
        if target is prims.inductor_random.default:
            size, seed, mode = args
            return getattr(torch, mode)(size, generator=_seeded(seed), dtype=torch.float32)
        if target is prims.inductor_randint.default:
            low, high, size, seed = args
            return torch.randint(low, high, size, generator=_seeded(seed))
        return super().call_function(target, args, kwargs)


def _seeded(seed: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))


def _run(graph: fx.GraphModule, args: Sequence[Any]) -> Any:
    with torch.no_grad():
        return _Ops(graph).run(*args)


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _random_like(fake: Tensor) -> Tensor:
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return made.copy_(torch.randn(fake.shape, generator=torch.Generator().manual_seed(3)))
