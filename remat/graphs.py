"""One captured graph: its plans, for what is resident, and for its place in a step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from remat.compilation import CompiledGraph, compile_graph
from remat.measurement import resident_tensors
from remat.partitioner import Ledger
from remat.passes.storages import main_device
from remat.passes.torch_private import autograd
from remat.plans import IN_STEP, Plan, Unplanned
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.schedule import Schedule
from remat.solvers.units import format_bytes

if TYPE_CHECKING:
    from remat.session import Session

OUTSIDE: Final = "outside the graph:"
"""How the note begins that says what code outside a graph adds to its step."""


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
    """One captured graph: plans it when made, and again when more is resident than was planned.

    Where it is one of several in a step, the session says which plan a call runs with.

    Attributes:
        steps: in how many steps it was called.
    """

    def __init__(
        self,
        session: Session,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        several: bool,
        elsewhere: bool = False,
    ) -> None:
        self._session = session
        self._elsewhere = elsewhere  # patterns of modules may mean those of other graphs
        self._graph = graph
        self._least: CompiledGraph | None = None
        # By the id of the plan, which it keeps alive: what runs, and its excess.
        self._placed: dict[int, tuple[Callable[..., Any], Plan, int]] = {}
        self._variants: list[_Variant] = []
        self._said = False
        self._forwards: list[weakref.ref[Any]] = []
        self._packed: CompiledGraph | None = None
        self.calls = 0
        first = self._compile_least(inputs) if several else self._compile(inputs)
        self._plan: Plan | Unplanned = first.plan

    @property
    def plan(self) -> Plan | Unplanned:
        """The plan of the latest call."""
        return self._plan

    def __call__(self, *inputs: Any) -> Any:
        # Said here, not while torch compiles: there a warning that is an error breaks compilation.
        if isinstance(self._plan, Unplanned) and not self._said:
            self._session.say(self._plan)  # where it raises, it raises at every call
            self._said = True
        self.calls += 1
        return self._session.run(self, inputs)

    def alone(self, inputs: Sequence[Any]) -> CompiledGraph:
        """What to run where the graph is a whole step: planned for what is resident now."""
        if isinstance(self._plan, Unplanned) or not torch.is_grad_enabled():
            return CompiledGraph(self._latest_run(), self._plan)
        variant = self._variant(inputs)
        self._plan = variant.plan
        return CompiledGraph(variant.run, variant.plan)

    def remark(self, moving: int, peak: int) -> None:
        """Note on the plan for ``moving`` bytes that the whole step peaks at ``peak``."""
        for index, variant in enumerate(self._variants):
            plan = variant.plan
            if variant.moving_bytes == moving and isinstance(plan, Plan):
                text = (
                    f"{OUTSIDE} code there, a loss say, raises the peak of the whole step by "
                    f"{format_bytes(peak - plan.peak)} to {format_bytes(peak)}"
                )
                notes = (note for note in plan.notes if not note.startswith(OUTSIDE))
                noted = dataclasses.replace(plan, notes=(*notes, text))
                self._variants[index] = dataclasses.replace(variant, plan=noted)

    def _latest_run(self) -> Callable[..., Any]:
        if self._variants:
            return self._variants[-1].run
        assert self._least is not None
        return self._least.run

    def least(self, inputs: Sequence[Any]) -> CompiledGraph:
        """What to run in a step that is not known yet: as little as can be."""
        made = self._least or self._compile_least(inputs)
        self._plan = made.plan
        return made

    def placed(self, plan: Plan, inputs: Sequence[Any]) -> CompiledGraph:
        """What to run at a place in a step that ``plan`` was made for."""
        if id(plan) not in self._placed:
            made = self._made_for(plan.solution.schedule) or self._compile_plan(plan, inputs)
            self._placed[id(plan)] = made.run, plan, made.excess
        self._plan = plan
        return CompiledGraph(self._placed[id(plan)][0], plan)

    def excess(self, plan: Plan) -> int:
        """Bytes that the code generated for a plan of :meth:`placed` takes beyond it."""
        return self._placed[id(plan)][2]

    def _made_for(self, schedule: Schedule) -> CompiledGraph | None:
        """What was compiled for the same schedule already."""
        for made in (*self._variants, self._least):
            plan = None if made is None else made.plan
            if made is not None and isinstance(plan, Plan) and plan.solution.schedule == schedule:
                return CompiledGraph(made.run, plan)
        for run, plan, excess in self._placed.values():
            if plan.solution.schedule == schedule:
                replayed = plan.predicted + excess
                return CompiledGraph(run, dataclasses.replace(plan, replayed_peak=replayed))
        return None

    def _compile_plan(self, plan: Plan, inputs: Sequence[Any]) -> CompiledGraph:
        # The budget is that of the step, which the session watches over; not of this graph.
        options = dataclasses.replace(
            self._session.options,
            memory_budget=None,
            solver="auto",
            every_n_layers=None,
            keep=(),  # the plan brings those that mean something in this graph
            recompute=(),
            plan=dataclasses.replace(plan, memory_budget=None),
        )
        return compile_graph(self._graph, inputs, options, self._ledger(inputs))

    def _compile_least(self, inputs: Sequence[Any]) -> CompiledGraph:
        options = dataclasses.replace(
            self._session.options, memory_budget=0.0, solver="auto", every_n_layers=None
        )
        made = compile_graph(self._graph, inputs, options, self._ledger(inputs))
        if isinstance(made.plan, Plan):
            note = (
                f"{IN_STEP} the least peak of this graph alone; there are several, and the "
                "sequence of their calls is not known yet"
            )
            made = CompiledGraph(
                made.run, dataclasses.replace(made.plan, notes=(*made.plan.notes, note))
            )
        self._least = made
        return made

    def count_waiting(self, plan: Plan, budget: int) -> None:
        """Say so if what earlier forwards hold for their backward does not fit beside this call."""
        alive = [(ref, node) for ref in self._forwards if (node := ref()) is not None]
        self._forwards = [ref for ref, _ in alive]
        waiting = autograd.count_holding(node for _, node in alive)
        # A recorded forward that waits has a pool of its own, which backward's temporaries are in.
        recorded = plan.executor == "cudagraph"
        each = plan.peak - plan.problem.fixed_bytes if recorded else plan.kept_bytes
        held = waiting * each
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

    def packed(self, inputs: Sequence[Any]) -> CompiledGraph:
        """What to run where hooks pack what is saved, or inside a backward: the same in every call.

        A checkpoint's hooks drop it, and run the call again in backward, in any order and as often
        as they like: what is saved then must be what was saved first.
        """
        if self._packed is None:
            self._packed = self.alone(inputs)
        return self._packed

    def watch(self, result: Any) -> None:
        """Remember that a call, which returned ``result``, waits for its backward."""
        node = autograd.backward_node(result)
        if node is not None:
            self._forwards.append(weakref.ref(node))

    def _variant(self, inputs: Sequence[Any]) -> _Variant:
        moving = self.moving(inputs)
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
        try:
            return self._compile(inputs)
        except BudgetTooSmall as error:
            if not self._variants:
                raise
            raise self._grown(error, moving, inputs) from error

    def _grown(self, error: BudgetTooSmall, moving: int, inputs: Sequence[Any]) -> BudgetTooSmall:
        """``error``, of a step that kept the budget once: what has come since, and what may yet."""
        before = min(variant.moving_bytes for variant in self._variants)
        leaves = {
            id(item): item.untyped_storage().nbytes()
            for item in inputs
            if isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad
            if item.grad is None
        }
        missing = sum(leaves.values())
        room = error.least_peak + missing
        text = (
            f"{error}\nThis step kept the budget before: {format_bytes(moving - before)} have come "
            "since (optimizer state, gradients being accumulated)"
        )
        if missing:
            text += (
                f", and gradients of {format_bytes(missing)} may come. With them the least is "
                f"about {format_bytes(room)}: memory_budget={room}"
            )
        return BudgetTooSmall(
            f"{text}.",
            memory_budget=error.memory_budget,
            least_peak=error.least_peak,
            peak_lower_bound=error.peak_lower_bound,
        )

    def moving(self, inputs: Sequence[Any]) -> int:
        """Bytes of what comes and goes between calls: gradients, optimizer state, and what the
        caller gives that the graph does not read.
        """
        tensors = (item for item in inputs if isinstance(item, torch.Tensor))
        return moving_bytes(tensors, self._session.options.optimizer) + self._session.given_bytes

    def _compile(self, inputs: Sequence[Any]) -> _Variant:
        made = compile_graph(self._graph, inputs, self._session.options, self._ledger(inputs))
        self._variants.append(_Variant(made.run, self.moving(inputs), made.plan))
        return self._variants[-1]

    def _ledger(self, inputs: Sequence[Any]) -> Ledger:
        device = main_device(item for item in inputs if isinstance(item, torch.Tensor))
        resident = self._session.resident(inputs, device)
        return Ledger(resident=resident, one_of_several=self._elsewhere)


def moving_bytes(tensors: Iterable[torch.Tensor], optimizer: Any) -> int:
    """Bytes of what comes and goes between calls: gradients of leaves, optimizer state."""
    total = 0
    for item in tensors:
        if item.requires_grad and item.is_leaf:
            gradient = item.grad
            total += 0 if gradient is None else _bytes(gradient)
    for state in optimizer.state.values() if optimizer is not None else ():
        for item in state.values():
            if isinstance(item, torch.Tensor):
                total += _bytes(item)
    return total


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout == torch.strided:
        return tensor.untyped_storage().nbytes()
    return sum(part.untyped_storage().nbytes() for part in resident_tensors(tensor))
