"""What the caller keeps of a forward for longer than its plan counts with: said once, in words."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from remat.passes.torch_private import autograd
from remat.plans import Plan, Unplanned
from remat.solvers.units import format_bytes


class Beyond:
    """Watches the calls of one compiled model.

    Args:
        say: reports what no plan covers.
    """

    def __init__(self, say: Callable[[Unplanned], None]) -> None:
        self._say = say
        self._retained = False
        self._packed = False

    def watch(self, result: Any, plan: Plan) -> None:
        """A call with this plan returned ``result``."""
        budget = plan.memory_budget
        if budget is None or plan.peak + plan.kept_bytes <= budget:
            return
        if not self._packed and autograd.packs_saved_tensors():
            self._say(
                Unplanned(
                    "hooks on saved tensors are active (save_on_cpu, your own, a checkpoint around "
                    f"the model): what they keep of the {format_bytes(plan.kept_bytes)} that this "
                    "graph saves is in no plan, and may break the budget of "
                    f"{format_bytes(budget)}; offload= and the budget do without them"
                )
            )
            self._packed = True
        node = None if self._retained else autograd.backward_node(result)
        if node is not None:
            weak = weakref.ref(node)

            def begins(_: Sequence[Any]) -> None:
                autograd.at_end_of_backward(ended)

            def ended() -> None:
                left = weak()
                if left is not None and autograd.count_holding([left]) and not self._retained:
                    self._say(_held_on(plan.kept_bytes, budget))
                    self._retained = True

            autograd.before_backward(node, begins)


def _held_on(kept: int, budget: int) -> Unplanned:
    return Unplanned(
        f"backward(retain_graph=True) holds what forward saved, {format_bytes(kept)}, to its end "
        f"and beyond; the budget of {format_bytes(budget)} counts on its being freed on the way: "
        "add losses up and call backward() once, or leave that much more room"
    )
