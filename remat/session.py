"""What must be remembered from call to call: the graphs of a model, their plans, what is resident.

A session belongs to one compiled callable, or to all that share one options object. Each graph
Dynamo hands over becomes a :class:`remat.graphs.GraphRunner`. A graph that is a whole step is
planned when it comes; where there are several in a step, :mod:`remat.sequences` shares the budget.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from remat.beyond import Beyond
from remat.compilation import CompiledGraph, trains
from remat.graphs import GraphRunner
from remat.inductor import TIGHTENED
from remat.measurement import given_tensors, resident_bytes
from remat.options import Options
from remat.passes.choices import is_known, unknown_pattern
from remat.passes.torch_private import autograd, dynamo
from remat.plans import Plan, Unplanned
from remat.sequences import Sequences
from remat.solvers.errors import BudgetTooSmall, CaptureError
from remat.solvers.units import format_bytes
from remat.step_plan import StepPlan


class UnplannedWarning(UserWarning):
    """A call ran without a plan: the budget says nothing about it."""


class Session:
    """The plans of one compiled callable.

    Attributes:
        options: as given.
        owner: the model, if it is known: all its parameters are resident, used or not.
        calls: how often a captured graph has run.
        given: the object the options were read from, kept alive.
    """

    def __init__(self, options: Options, owner: object = None, given: object = None) -> None:
        self.options = options
        self.given = given
        self.owner = owner
        self.calls = 0
        self._checked = False
        self._was_broken = False
        self._given: list[torch.Tensor] = []
        self._graphs: list[GraphRunner] = []
        self._sequences = Sequences(options, owner, self.say)
        self._beyond = Beyond(self.say)
        self._breaks: Counter[str] | None = None

    @property
    def step_plan(self) -> StepPlan | None:
        """How the latest step that was planned as a whole shares the budget; None if none was: it
        is where there are several graph calls, or where code outside a single graph (a loss) takes
        more than its own plan leaves.
        """
        return self._sequences.plan

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
        broken = self._is_broken(graph)
        self._was_broken |= broken
        several = self._has_budget and trains(example_inputs) and self._is_one_of_several(broken)
        # Blocks compiled with one options object are graphs of one step; the first comes alone.
        elsewhere = several or self._was_broken or (self.given is not None and self._has_budget)
        with self._unwatched():
            runner = GraphRunner(self, graph, example_inputs, several=several, elsewhere=elsewhere)
        self._graphs.append(runner)
        return runner

    @property
    def _has_budget(self) -> bool:
        # A replay moves no counter of the allocator: a recorded step cannot be watched as a whole.
        recorded = self.options.executor == "cudagraph" and self.options.inductor is None
        return self.options.memory_budget is not None and self.options.plan is None and not recorded

    def _is_broken(self, graph: fx.GraphModule) -> bool:
        """Whether it ends before its function does.

        A break inside a loop, or under a backward hook, leaves graphs that say nothing of it.
        """
        hidden = self._breaks is not None and dynamo.graph_breaks() - self._breaks
        return dynamo.break_reason(graph) is not None or bool(hidden)

    def _is_one_of_several(self, broken: bool) -> bool:
        """Whether it cannot be the whole step."""
        self._sequences.several |= broken
        return self._sequences.several or self._sequences.waiting

    @contextlib.contextmanager
    def entered(self, inputs: Any) -> Iterator[None]:
        """Around a call of the compiled callable with ``inputs``."""
        if not torch.is_grad_enabled():
            yield
            return
        self._given = list(given_tensors(inputs))
        watched = self._has_budget
        self._breaks = dynamo.graph_breaks()
        if watched:
            self._sequences.enter(self._given)
        returned = False
        try:
            yield
            self._check_patterns()
            returned = True
        finally:
            self._breaks, self._given = None, []
            if watched:
                self._sequences.leave(failed=not returned)

    def _check_patterns(self) -> None:
        """Refuse a pattern that means no module of any graph, once all of a step have come."""
        if self._checked or not (self.options.keep or self.options.recompute):
            return
        plans = [plan for plan in self.plans if isinstance(plan, Plan)]
        ops = [op for plan in plans for op in plan.problem.ops]
        for option in ("keep", "recompute"):
            for pattern in getattr(self.options, option):
                if plans and not is_known(ops, pattern):
                    raise unknown_pattern(ops, option, pattern, "any graph of this step")
        self._checked = bool(plans)

    def close(self) -> None:
        """What is watched is watched no longer: a call has failed, or nobody can call any more."""
        if self._sequences.step is not None:
            self._sequences.step.forget()

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Compiling is no part of a step whose bytes are watched."""
        step = self._sequences.step
        watched = step is not None and step.interrupt()
        try:
            yield
        finally:
            if watched and step is not None:
                step.resume()

    def run(self, runner: GraphRunner, inputs: Sequence[Any]) -> Any:
        """Run a graph with the plan that its place in the step asks for."""
        self.calls += 1
        if isinstance(runner.plan, Unplanned):
            return self._run_alone(runner, inputs)
        with dynamo.turns():  # a plan for other resident bytes is compiled here
            return self._run_planned(runner, inputs)

    def _run_planned(self, runner: GraphRunner, inputs: Sequence[Any]) -> Any:
        again = autograd.packs_saved_tensors() or autograd.runs_backward()
        if again and torch.is_grad_enabled():
            made = runner.packed(inputs)
            result = made.run(*inputs)
            if isinstance(made.plan, Plan):
                self._beyond.watch(result, made.plan)
            return result
        if not self._has_budget or not torch.is_grad_enabled():
            return self._run_alone(runner, inputs)
        returned = False
        try:
            result = self._run_in_step(runner, inputs)
            returned = True
        finally:
            if not returned:
                self.close()
        return result

    def _run_in_step(self, runner: GraphRunner, inputs: Sequence[Any]) -> Any:
        chosen = self._sequences.choose(runner, inputs)
        if self._sequences.finished:
            self._check_patterns()
        with self._unwatched():
            if chosen == "alone":
                made = runner.alone(inputs)
            else:
                made = self._placed(runner, chosen, inputs)
        step = self._sequences.step
        assert step is not None
        assert isinstance(made.plan, Plan)
        call = step.enter(runner, made.plan)
        result = made.run(*inputs)
        step.leave(call, result)
        self._beyond.watch(result, made.plan)
        self._sequences.returned(result)
        return result

    def _placed(
        self, runner: GraphRunner, chosen: Plan | None, inputs: Sequence[Any]
    ) -> CompiledGraph:
        """What runs at a place in a step: its plan, or one for less until the code fits."""
        for again in range(1 + TIGHTENED):
            if chosen is None:
                break
            made, excess = runner.placed(chosen, inputs), runner.excess(chosen)
            over = self._sequences.over(chosen, excess)
            if not over or (again == TIGHTENED and self.options.budget.kind == "fraction"):
                return made
            if again == TIGHTENED:
                raise _over_budget(chosen, over)
            chosen = self._sequences.tightened(excess)
        return runner.least(inputs)

    def _run_alone(self, runner: GraphRunner, inputs: Sequence[Any]) -> Any:
        made = runner.alone(inputs)
        if isinstance(made.plan, Unplanned) or made.plan.memory_budget is None:
            return made.run(*inputs)
        runner.count_waiting(made.plan, made.plan.memory_budget)
        result = made.run(*inputs)
        runner.watch(result)
        self._beyond.watch(result, made.plan)
        return result

    def say(self, unplanned: Unplanned) -> None:
        """Report what no plan covers, as ``on_unplanned`` wants it."""
        without_budget = self.options.memory_budget is None and self.options.plan is None
        if without_budget or self.options.on_unplanned == "ignore":
            return
        if self.options.on_unplanned == "raise":
            raise CaptureError(str(unplanned))
        warnings.warn(str(unplanned), UnplannedWarning, stacklevel=3)

    @property
    def given_bytes(self) -> int:
        """What the caller gives to the call that runs, as far as it is known, read or not."""
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._given}
        return sum(sizes.values())

    def resident(self, inputs: Sequence[Any], device: torch.device) -> int:
        """Bytes at entry: parameters, buffers, inputs, gradients, optimizer state if declared."""
        return resident_bytes((inputs, self._given, self.owner, self.options.optimizer), device)


def _over_budget(plan: Plan, over: int) -> BudgetTooSmall:
    budget = plan.memory_budget
    assert budget is not None
    reached = budget + over
    return BudgetTooSmall(
        f"memory_budget is {format_bytes(budget)} ({budget} bytes), but in {1 + TIGHTENED} "
        f"compilations inductor's code brought the whole step to {format_bytes(reached)} "
        f"({reached} bytes) at least. Give that much, or a smaller batch; "
        'executor="eager" follows its plan to the byte',
        memory_budget=budget,
        least_peak=reached,
        peak_lower_bound=plan.solution.peak_lower_bound,
    )


def not_one_graph(broken: dynamo.Break) -> CaptureError:
    """The error for a step that is several graphs."""
    return CaptureError(
        f"the model was captured as more than one graph: {broken.line} breaks it "
        f"({broken.reason}). Without running the step only one graph can be planned: use "
        "remat.compile, which shares the budget over several, and read .step_plan after the second "
        "step; or remove what breaks the graph (a "
        "Hugging Face model: call it without labels= and compute the loss from its logits)"
    )
