"""A plan for a recorded graph is held to the memory of its pool.

What a recorded step takes is what its pool has reserved (:mod:`remat.executors.cudagraph_pool`),
which the solvers do not see: they count what is alive. Where the pool of their plan breaks the
budget, they are asked for less, by what was too much, four times at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import fx

from remat.executors.cudagraph_pool import captured_peak
from remat.passes.capture_safe import capture_safe, generators_in
from remat.passes.joint import JointGraph
from remat.passes.storages import tensors_of
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.problem import Problem
from remat.solvers.schedule import Solution
from remat.solvers.units import format_bytes

_TRIES: Final = 4


def in_pool(
    problem: Problem,
    first: Solution,
    budget: int | None,
    solve: Callable[[int], Solution],
    *,
    static: int,
    is_fraction: bool,
) -> tuple[Solution, int, int | None]:
    """The solution to record, its peak with the pool, and the budget it keeps.

    Args:
        first: the solution for ``budget`` bytes alive.
        solve: finds one for fewer bytes alive.
        static: bytes of copies at fixed addresses.
        is_fraction: the budget was a fraction. Of that the least peak that was reached will do.

    Raises:
        BudgetTooSmall: no pool was found that keeps a budget of bytes.
    """
    best, peak = first, captured_peak(problem, first.schedule, static=static)
    if budget is None:
        return best, peak, None
    aim, lowest = budget, peak
    for _ in range(_TRIES):
        if peak <= budget:
            break
        aim -= lowest - budget
        if aim <= 0:
            break
        try:
            found = solve(aim)
        except BudgetTooSmall:
            break
        lowest = captured_peak(problem, found.schedule, static=static)
        if lowest < peak:
            best, peak = found, lowest
        if lowest <= budget:
            break
    if peak <= budget or is_fraction:
        return best, peak, max(peak, budget)
    raise BudgetTooSmall(
        f"recorded as a CUDA graph the step takes {format_bytes(peak)} ({peak} bytes) at the least "
        f"that was found, with the rounding of its pool, and memory_budget is "
        f"{format_bytes(budget)} ({budget} bytes); what is alive at its peak are "
        f"{format_bytes(best.peak)}. Give the difference, or run the plan unrecorded: "
        'executor="eager"',
        memory_budget=budget,
        least_peak=peak,
        peak_lower_bound=best.peak_lower_bound,
    )


def copied_bytes(joint: JointGraph, granularity: int, torch_options: Mapping[str, Any]) -> int:
    """Bytes of copies beside a recorded forward and backward: of inputs that move, of what forward
    returns, and of gradients, which autograd does not take over out of a graph's memory.

    Args:
        torch_options: what AOTAutograd passes to a partition.
    """
    stays = set(torch_options.get("static_lifetime_input_indices") or ())
    nodes = [node for index, node in enumerate(joint.primals) if index not in stays]
    nodes += [node for node in joint.forward_outputs if isinstance(node, fx.Node)]
    nodes += dict.fromkeys(node for node in joint.backward_outputs if isinstance(node, fx.Node))
    sizes = (t.numel() * t.element_size() for node in nodes for t in tensors_of(node))
    return sum(-(-size // granularity) * granularity for size in sizes)


def recording_notes(module: fx.GraphModule, device_type: str) -> tuple[str, ...]:
    """What of a graph stands in the way of recording it, one note each, for its plan."""
    generators = generators_in(module, device_type)
    found = capture_safe(module, device_type=device_type, generators=generators)
    return tuple(f"cannot be recorded as a CUDA graph: {obstacle}" for obstacle in found)
