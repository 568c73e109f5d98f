"""One captured graph, split by many schedules: each pair of graphs computes what torch's own does.

Capturing a program takes a second, splitting and running it a few hundredths: this tries schedules
where ``remat.compile`` would try one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from remat.passes.costs import OpCost
from remat.passes.joint import JointGraph
from remat.passes.lower import Lowered, lower, op_nodes
from remat.passes.mutation import pin_mutated_reads
from remat.passes.split import split
from remat.passes.storages import Storages
from remat.passes.torch_private import partition as private
from remat.passes.verify import verify_split
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
    primals: list[Any] = field(default_factory=list)

    def run(self, graphs: Graphs) -> dict[str, Any]:
        """Forward and backward on copies of the recorded inputs: all they compute or write."""
        joint = self.lowered.joint
        torch.manual_seed(5)
        primals = [_copy(item) for item in self.primals]
        with torch.no_grad():
            returned = list(private.boxed(graphs[0], [])(list(primals)))
            outputs = [_copy(item) for item in returned[: joint.num_forward_outputs]]
            saved = returned[joint.num_forward_outputs :]
            del returned
            tangents = [_random_like(node.meta["val"]) for node in joint.tangents]
            gradients = private.boxed(graphs[1], [])([*saved, *tangents])
        return {
            "outputs": outputs,
            "gradients": list(gradients),
            "primals": primals,
            "rng": torch.get_rng_state(),
        }

    def check(self, schedule: Schedule) -> None:
        """Hold the graphs of ``schedule`` to torch's own."""
        simulate(self.lowered.problem, schedule)
        graphs = split(self.lowered, schedule)
        verify_split(self.lowered, schedule, *graphs)
        assert differences(self.run(self.own), self.run(graphs)) == []


def record(function: Callable[..., Any], *args: Any) -> list[Recorded]:
    """Call ``function`` once, compiled by torch's own partition; its graphs that train."""
    found: list[Recorded] = []

    def partition(
        module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> Graphs:
        joint = pin_mutated_reads(JointGraph.make(module, num_fwd_outputs))
        storages = Storages.of(joint)
        costs = {node: OpCost(1e-6) for node in op_nodes(joint, storages)}
        own = private.default_partition(module, inputs, num_fwd_outputs, **options)
        found.append(Recorded(lower(joint, storages, costs), own))
        return own

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = private.boxed(graph, inputs)

        def call(given: list[Any]) -> Any:
            if not found[-1].primals:
                found[-1].primals = [_copy(item) for item in given]
            return run(given)

        call._boxed_call = True  # type: ignore[attr-defined]  AOTAutograd then passes a list
        return call

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return private.aot_compile(graph, inputs, partition=partition, compiler=compiler)

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*args)
    return found


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _random_like(fake: Tensor) -> Tensor:
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return made.copy_(torch.randn(fake.shape, generator=torch.Generator().manual_seed(3)))
