"""What must be remembered from call to call: the graphs of a model, their plans, what is resident.

A session belongs to one compiled callable. Each graph Dynamo hands over becomes a
:class:`GraphRunner`, which knows the bytes that were resident when its plan was made; where a later
call finds more (gradients being accumulated, optimizer state that has come into being) and the plan
would no longer keep the budget, the graph is planned again for what is there.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.compilation import compile_graph
from remat.measurement import resident_bytes
from remat.options import Options
from remat.partitioner import Ledger
from remat.passes.storages import main_device
from remat.passes.torch_private import autograd, dynamo
from remat.plans import Plan, Unplanned
from remat.solvers.errors import CaptureError
from remat.solvers.units import format_bytes


class UnplannedWarning(UserWarning):
    """A call ran without a plan: the budget says nothing about it."""


class Session:
    """The plans of one compiled callable.

    Attributes:
        options: as given.
        owner: the model, if it is known: all its parameters are resident, used or not.
        calls: how often a captured graph has run.
    """

    def __init__(self, options: Options, owner: object = None) -> None:
        self.options = options
        self.owner = owner
        self.calls = 0
        self._graphs: list[GraphRunner] = []

    @property
    def plans(self) -> tuple[Plan | Unplanned, ...]:
        """One for each captured graph, in the order they came: the plan that ran last, or why there
        is none.
        """
        return tuple(runner.plan for runner in self._graphs)

    def backend(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What ``torch.compile`` calls for every graph it captures."""
        for item in example_inputs:
            if isinstance(item, torch.SymInt):
                raise CaptureError(
                    f"an input has a dynamic size ({item}); this version plans static sizes: "
                    "compile with dynamic=False, so that every size gets its own plan"
                )
        if _trains(example_inputs):
            refuse_break(graph)
        runner = GraphRunner(self, graph, example_inputs)
        self._graphs.append(runner)
        return runner

    def say(self, unplanned: Unplanned) -> None:
        """Report what no plan covers, as ``on_unplanned`` wants it."""
        without_budget = self.options.memory_budget is None and self.options.plan is None
        if without_budget or self.options.on_unplanned == "ignore":
            return
        if self.options.on_unplanned == "raise":
            raise CaptureError(str(unplanned))
        warnings.warn(str(unplanned), UnplannedWarning, stacklevel=3)

    def resident(self, inputs: Sequence[Any], device: torch.device) -> int:
        """Bytes at entry: parameters, buffers, inputs, gradients, optimizer state if declared."""
        return resident_bytes((inputs, self.owner, self.options.optimizer), device)


@dataclass(frozen=True)
class _Variant:
    """A graph compiled for a certain amount of gradients and optimizer state."""

    run: Callable[..., Any]
    moving_bytes: int
    plan: Plan | Unplanned

    def keeps_budget(self, moving_bytes: int) -> bool:
        if isinstance(self.plan, Unplanned) or self.plan.memory_budget is None:
            return True
        return self.plan.peak + moving_bytes - self.moving_bytes <= self.plan.memory_budget

    def moved(self, moving_bytes: int, *, budget_too: bool) -> _Variant:
        """The same graphs, and their plan with that much resident."""
        assert isinstance(self.plan, Plan)
        change = moving_bytes - self.moving_bytes
        return _Variant(self.run, moving_bytes, self.plan.shifted(change, budget_too=budget_too))


class GraphRunner:
    """One captured graph: plans it when made, and again when more is resident than was planned."""

    def __init__(self, session: Session, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._session = session
        self._graph = graph
        self._variants = [self._compile(inputs)]
        self._active = self._variants[0]
        self._said = False
        self._forwards: list[weakref.ref[Any]] = []

    @property
    def plan(self) -> Plan | Unplanned:
        """The plan of the latest call."""
        return self._active.plan

    def __call__(self, *inputs: Any) -> Any:
        self._active = self._variant(inputs)
        # Said here, not while torch compiles: there a warning that is an error breaks compilation.
        if isinstance(self._active.plan, Unplanned) and not self._said:
            self._session.say(self._active.plan)  # where it raises, it raises at every call
            self._said = True
        self._session.calls += 1
        if isinstance(self._active.plan, Unplanned) or self._active.plan.memory_budget is None:
            return self._active.run(*inputs)
        self._count_waiting(self._active.plan, self._active.plan.memory_budget)
        result = self._active.run(*inputs)
        node = autograd.backward_node(result)
        if node is not None:
            self._forwards.append(weakref.ref(node))
        return result

    def _count_waiting(self, plan: Plan, budget: int) -> None:
        """Say so if what earlier forwards hold for their backward does not fit beside this call."""
        alive = [(ref, node) for ref in self._forwards if (node := ref()) is not None]
        self._forwards = [ref for ref, _ in alive]
        waiting = autograd.count_holding(node for _, node in alive)
        held = waiting * plan.kept_bytes
        if waiting == 0 or plan.peak + held <= budget or self._said:
            return
        self._session.say(
            Unplanned(
                f"{waiting} earlier forward{'s' * (waiting > 1)} of this graph still wait for "
                f"backward and hold {format_bytes(held)}; the budget of {format_bytes(budget)} is "
                "that of one forward and backward at a time: call backward() after each forward, "
                "or leave that much more room"
            )
        )
        self._said = True

    def _variant(self, inputs: Sequence[Any]) -> _Variant:
        if isinstance(self._active.plan, Unplanned) or not torch.is_grad_enabled():
            return self._active
        moving = self._moving_bytes(inputs)
        for variant in self._variants:
            if variant.moving_bytes == moving:
                return variant
        # A fraction is a place between two peaks that both grow with what is resident: its budget
        # moves along. Bytes stay: where they no longer suffice, the graph is planned again.
        moves = self._session.options.budget.kind == "fraction"
        for variant in self._variants:
            if moves or variant.keeps_budget(moving):
                self._variants.append(variant.moved(moving, budget_too=moves))
                return self._variants[-1]
        self._variants.append(self._compile(inputs))
        return self._variants[-1]

    def _moving_bytes(self, inputs: Sequence[Any]) -> int:
        """Bytes of what comes and goes between calls: gradients, optimizer state."""
        total = 0
        for item in inputs:
            if isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf:
                gradient = item.grad
                total += 0 if gradient is None else gradient.untyped_storage().nbytes()
        optimizer = self._session.options.optimizer
        for state in optimizer.state.values() if optimizer is not None else ():
            for item in state.values():
                if isinstance(item, torch.Tensor):
                    total += item.untyped_storage().nbytes()
        return total

    def _compile(self, inputs: Sequence[Any]) -> _Variant:
        device = main_device(item for item in inputs if isinstance(item, torch.Tensor))
        ledger = Ledger(resident=self._session.resident(inputs, device))
        made = compile_graph(self._graph, inputs, self._session.options, ledger)
        return _Variant(made.run, self._moving_bytes(inputs), made.plan)


def refuse_break(graph: fx.GraphModule) -> None:
    """Refuse a graph that ends before its function does.

    Raises:
        CaptureError: names the line that breaks it, and why.
    """
    broken = dynamo.break_reason(graph)
    if broken is not None:
        raise not_one_graph(broken)


def refuse_breaks(reasons: Counter[str]) -> None:
    """Refuse a step that was not one graph, though the graphs it left do not say so.

    Raises:
        CaptureError: with the reasons.
    """
    if reasons:
        broken = dynamo.Break("something (TORCH_LOGS=graph_breaks shows its line)", min(reasons))
        raise not_one_graph(broken)


def not_one_graph(broken: dynamo.Break) -> CaptureError:
    """The error for a step that is several graphs."""
    return CaptureError(
        f"the model was captured as more than one graph: {broken.line} breaks it "
        f"({broken.reason}). One memory budget over several graphs is not in this version: "
        "remove what breaks the graph, or move it out of the compiled function (a Hugging Face "
        "model: call it without labels= and compute the loss from its logits)"
    )


def _trains(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in inputs
    )

