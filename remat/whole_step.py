"""``remat.compile_step``: loss, gradients and the optimizer's update in one graph.

A step runs in Python when it is captured, and ever more rarely afterwards, to see whether it still
comes out the same. In between its graph runs alone.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, overload

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat import step_key
from remat.compilation import holding_tier
from remat.cost.device import find_device
from remat.cost.model import CostModel
from remat.executors import cudagraph
from remat.lowering import has_exact_kernels, planned_for
from remat.measurement import resident_bytes
from remat.options import Options
from remat.partitioner import make_plan
from remat.passes.emit_step import emit_step
from remat.passes.lower import lower, op_nodes
from remat.passes.offload import Place
from remat.passes.storages import main_device
from remat.passes.torch_private import dynamo, tracing
from remat.passes.updates import program_order, with_updates
from remat.passes.whole_step import StepGraph, step_storages
from remat.plan_log import log_plan
from remat.plans import Plan
from remat.pooled import recording_notes
from remat.solvers.errors import CaptureError, InvalidOption
from remat.step_places import Places
from remat.step_reach import unbound
from remat.step_side import Flags, numbers_restored
from remat.step_trace import Account, Bound, Leaf, is_tracing, rate_tensors, trace

_LIMIT: Final = 8
_TURNS: Final = threading.RLock()
"""Threads take turns: while one traces, the modules it names hold the tensors of its trace."""
_REFUSED: Final = ("double_backward", "inductor", "plan", "optimizer")

Graph = Callable[..., Any]


@dataclass
class _Captured:
    """One traced step, planned and ready to run.

    Attributes:
        changed: what a trace of it changed in Python: its graph is not run again.
        flags: what every run switches.
        account: of its first trace, to compare others with.
        calls: with this graph, beside the first.
        differs: another trace came out otherwise.
    """

    graph: Graph
    bound: Bound
    plan: Plan
    changed: str
    flags: Flags
    account: Account
    calls: int = 0
    differs: bool = False

    def is_looked_at(self) -> bool:
        """Whether this call traces again: the second, third, fifth, ninth, … does."""
        self.calls += 1
        return self.calls.bit_count() == 1


class CompiledStep:
    """A training step in one graph; call it like the function.

    What it returns has no autograd history: the gradients were computed inside.

    Attributes:
        plans: one for each kind of call so far (other sizes, a fresh optimizer), in order.
    """

    def __init__(self, function: Callable[..., Any], state: object, options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._state = state
        self._options = options
        self._captured: dict[Any, _Captured] = {}

    # As with a function, a copy means the same modules; a method's owner is copied with it.

    def __copy__(self) -> CompiledStep:
        return CompiledStep(self._function, self._state, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        function = copy.deepcopy(self._function, memo)
        shared = function is self._function
        state = self._state if shared else copy.deepcopy(self._state, memo)
        memo[id(self)] = copied = CompiledStep(function, state, self._options)
        return copied

    def __reduce__(self) -> Any:
        name = vars(self).get("__qualname__", "")
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return name  # a decorated function, found where it was defined
        return CompiledStep, (self._function, self._state, self._options)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """See the class."""
        return tuple(captured.plan for captured in self._captured.values())

    @dynamo.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._function(*args, **kwargs)  # a part of the step that is being traced
        function, args, kwargs = unbound(self._function, args, kwargs)
        with _TURNS:
            places = self._places(args, kwargs)
            key = step_key.signature(places)
            captured = self._captured.get(key)
            if captured is None:
                self._check_limit(key, places)
                with numbers_restored(places, only_if_it_fails=True):
                    captured = _capture(function, places, self._options)
                self._captured[key] = captured
            elif captured.differs:
                raise CaptureError(
                    "the step came out otherwise before, though nothing that remat looks at had "
                    "changed, and its graph is not run again: hand over as an argument what moves"
                )
            elif captured.changed:
                raise CaptureError(
                    f"the step changes {captured.changed} in Python, which happened when it was "
                    "captured, and which its graph does not do again: do it outside the step, or "
                    "in a tensor"
                )
            elif captured.is_looked_at():
                _look_again(function, places, self._options, captured)
            return _run(captured, places)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for a call with these arguments; the step is traced, not run.

        Raises:
            BudgetTooSmall: no plan fits.
            CaptureError: the step cannot be one graph.
        """
        function, args, kwargs = unbound(self._function, args, kwargs)
        with _TURNS:
            places = self._places(args, kwargs)
            with numbers_restored(places):
                return _capture(function, places, self._options, run=False).plan

    def _places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Places:
        # A recorded graph could not read a number on the host anew.
        lifts = self._options.executor != "cudagraph"
        return Places.of(self._function, self._state, args, kwargs, lifts_rates=lifts)

    def _check_limit(self, key: step_key.Key, places: Places) -> None:
        if len(self._captured) >= _LIMIT:
            last = next(reversed(self._captured))
            raise CaptureError(
                f"the step was captured {_LIMIT} times, and comes different again. From the last "
                f"capture to this call, {step_key.difference(last, key, places)} changed. All that "
                f"the step reads becomes part of its graph: give numbers as tensors "
                f"({self._of_rates}), do not make functions anew for every call, and pad inputs to "
                "fewer shapes"
            )

    @property
    def _of_rates(self) -> str:
        if self._options.executor == "cudagraph":
            return "learning rates in param_groups, too: a recorded graph reads no number anew"
        return "a learning rate in param_groups is read anew anyway"


@overload
def compile_step(function: Callable[..., Any], **options: Any) -> CompiledStep: ...
@overload
def compile_step(
    function: None = None, **options: Any
) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile_step(
    function: Callable[..., Any] | None = None, *, state: object = (), **options: Any
) -> Any:
    """Compile a whole training step into one graph within a memory budget; also a decorator.

    The function computes its gradients inside, by ``torch.autograd.grad`` or ``backward()``, and
    may update parameters, by hand or by an optimizer's ``step()``. Nothing is saved at a boundary
    between forward and backward; values are kept or computed again wherever it pays, and updates
    run as early as that lowers the peak. What its code reads (numbers, functions, classes,
    attributes of objects, hooks of modules) is part of the graph and its key. Calls 2, 3, 5,
    9, 17, … of each graph run the function in Python again, to see that it comes out the same; a
    graph whose run changed something in Python (a counter, a scheduler) is not run again. ::

        @remat.compile_step(memory_budget="16GiB")
        def step(batch):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    Args:
        function: the step. Modules, optimizers and tensors are found in its arguments, its
            closure, the globals it names, and ``self``.
        state: further modules and optimizers, that it reaches in other ways.
        options: see :class:`remat.Options`; the executors are ``"eager"`` (the default) and
            ``"cudagraph"``.

    Raises:
        InvalidOption: an option is wrong, or means nothing here.
        BudgetTooSmall: (at the first call) no plan keeps the budget.
        CaptureError: (at the first call) the step cannot be one graph; (later) it came out
            otherwise than at the first.
    """
    checked = Options.make(**{"executor": "eager", **options})
    if checked.executor == "inductor":
        raise InvalidOption(
            'compile_step runs a step by executor="eager" or "cudagraph", not "inductor"; '
            "remat.compile compiles the loss with inductor"
        )
    for name in _REFUSED:
        if options.get(name):
            raise InvalidOption(
                f"{name}= says nothing to compile_step in this version; leave it out"
                + (" (the optimizer is found where the step uses it)" * (name == "optimizer"))
            )
    if function is None:
        return lambda given: CompiledStep(given, state, checked)
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise InvalidOption(
            f"compile_step takes the function of a whole step, not {type(function).__name__}; a "
            "module is for remat.compile"
        )
    return CompiledStep(function, state, checked)


def _capture(
    function: Callable[..., Any], places: Places, options: Options, *, run: bool = True
) -> _Captured:
    traced = trace(function, places, options, run=run)
    step, effects, account = traced.step, traced.effects, traced.account
    device = main_device(places.inputs)
    spec = find_device(options.device or device)
    storages = step_storages(step, spec.granularity, device.type)
    here = run and spec.torch_device is not None
    model = CostModel(spec, options.cost or ("measured" if here else "roofline"), run=run)
    lowered = lower(
        step,
        storages,
        model.costs(op_nodes(step, storages)),
        fixed_bytes=resident_bytes(
            [*places.inputs, *rate_tensors(places)], device, spec.granularity
        ),
        cost=f"{model.mode} on {spec.name}",
        replays_random=options.executor != "cudagraph",
        same_kernels=has_exact_kernels(device),
    )
    notes = ["a whole step in one graph: loss, gradients, updates", *lowered.kept]
    if step.backwards > 1:
        notes.append(
            f"{step.backwards} backward passes in one step: only what is computed before the first "
            "is computed again for them; what later forwards save is kept. To save memory there, "
            "take one micro-batch a step, or remat.compile the loss"
        )
    if spec.torch_device is None:
        notes.append(planned_for(spec, device, lowered.problem))
    if options.executor == "cudagraph":
        notes += recording_notes(step.module, device.type)
    lowered, plan = make_plan(
        with_updates(lowered, step, spec.bandwidth),
        lambda decided: program_order(decided.problem),
        options,
        spec,
        graph_hash=step.hash,
        static=_static_bytes(step, places, spec.granularity),
        notes=tuple(notes),
    )
    log_plan(plan)
    place = None if plan.offload is None else Place(plan.offload)
    made = emit_step(lowered, plan.solution.schedule, place)
    graph = _runner(step, made, options, places, plan) if run else made
    return _Captured(graph, traced.bound, plan, effects.changed, effects.flags, account)


def _look_again(
    function: Callable[..., Any], places: Places, options: Options, captured: _Captured
) -> None:
    """Trace a step a second time: what it reads and no key tells shows by another graph.

    Raises:
        CaptureError: it came out otherwise; its graph is not run again.
    """
    with numbers_restored(places, only_if_it_fails=True):
        traced = trace(function, places, options, run=True)
        difference = traced.difference(captured.account)
        if difference:
            captured.differs = True
            raise CaptureError(
                f"call {captured.calls + 1} of the step came out otherwise than the first "
                f"({difference}), though nothing that remat looks at has changed: the step reads "
                "something that moves (the time, a file, a cache). Read it outside the step, and "
                "hand it over as an argument"
            )
    captured.changed = traced.effects.changed


def _static_bytes(step: StepGraph, places: Places, granularity: int) -> int:
    """For a recorded step: copies of its arguments, and of what it returns."""
    sizes = [places.inputs[index].untyped_storage().nbytes() for index in places.passed()]
    for node in step.results:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel() * value.element_size())
    return sum(-(-size // granularity) * granularity for size in sizes)


def _runner(
    step: StepGraph, made: fx.GraphModule, options: Options, places: Places, plan: Plan
) -> Graph:
    if options.executor != "cudagraph":
        return holding_tier(made, plan, main_device(places.inputs))
    copied = places.passed()  # and written back, where the step writes into them
    static = [index not in copied for index in range(len(step.inputs))]
    return cudagraph.whole_step(step, made, static, inputs=places.inputs)


def _run(captured: _Captured, places: Places) -> Any:
    with tracing.as_traced():
        outputs = captured.graph(*places.inputs, *rate_tensors(places))
    bound = captured.bound

    def value(leaf: Leaf) -> Any:
        kind, what = leaf
        if kind == "alias":
            return what.of(places.inputs)
        if kind == "output":
            return outputs[what]
        return places.inputs[what] if kind == "input" else what

    for index, leaf in bound.gradients.items():
        places.inputs[index].grad = value(leaf)
    for entry, leaf in bound.state.items():
        parameter = places.inputs[entry.parameter]
        places.optimizers[entry.optimizer].state[parameter][entry.key] = value(leaf)
    captured.flags.switch(places)
    return pytree.tree_unflatten([value(leaf) for leaf in bound.result], bound.tree)
