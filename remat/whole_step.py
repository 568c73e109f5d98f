"""``remat.compile_step``: loss, gradients and the optimizer's update in one graph.

The step is traced with all its tensors as inputs of a function: parameters, buffers, gradients,
optimizer state, arguments. What it returns, and what it binds anew (a gradient, a fresh entry of an
optimizer's state), are outputs; what it writes in place is updated in the graph.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, overload

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.compilation import holding_tier
from remat.cost.device import described_capability, find_device
from remat.cost.model import CostModel
from remat.executors import cudagraph
from remat.lowering import planned_for
from remat.measurement import resident_bytes
from remat.options import Options
from remat.partitioner import make_plan
from remat.passes import ops
from remat.passes.attention import RoutedAttention
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
from remat.solvers.errors import CaptureError, InvalidOption, RematError
from remat.step_contents import SYMBOLIC
from remat.step_errors import explained
from remat.step_names import tensors_in
from remat.step_places import Places
from remat.step_reach import unbound
from remat.step_side import Flags, SideEffects, numbers_restored
from remat.step_swapped import Entry, Swapped, swapped

_LIMIT: Final = 8
_TRACING: Final = threading.local()
_TURNS: Final = threading.RLock()
"""Threads take turns: while one traces, the modules it names hold the tensors of its trace."""
_SYMBOL: Final = re.compile(r"\b(zuf|u)\d+\b")
_REFUSED: Final = ("double_backward", "inductor", "plan", "optimizer")

Graph = Callable[..., Any]


@dataclass(frozen=True)
class _Bound:
    """What a step leaves behind beside its updates.

    Attributes:
        result: the returned tree: leaves are ``("input", i)``, ``("output", i)``, ``("alias",
            view of an input)`` or ``("plain", value)``.
        gradients: input → output that is its new ``.grad``, or None where it is dropped.
        state: entry of an optimizer's state → leaf, as in ``result``.
    """

    result: list[tuple[str, Any]]
    tree: Any
    gradients: dict[int, tuple[str, Any]]
    state: dict[Entry, tuple[str, Any]]


@dataclass(frozen=True)
class _Captured:
    """One traced step, planned and ready to run."""

    graph: Graph
    bound: _Bound
    plan: Plan
    changed: str  # in Python, while it was traced: it is run once, and never again
    flags: Flags  # what every run switches


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
        if getattr(_TRACING, "function", None) is not None:
            return self._function(*args, **kwargs)  # a part of the step that is being traced
        function, args, kwargs = unbound(self._function, args, kwargs)
        with _TURNS:
            places = self._places(args, kwargs)
            key = places.signature()
            if key not in self._captured:
                self._check_limit()
                with numbers_restored(places, only_if_it_fails=True):
                    self._captured[key] = _capture(function, places, self._options)
            elif changed := self._captured[key].changed:
                raise CaptureError(
                    f"the step changes {changed} in Python, which happened when it was captured, "
                    "and which its graph does not do again: do it outside the step, or in a tensor"
                )
            return _run(self._captured[key], places)

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

    def _check_limit(self) -> None:
        if len(self._captured) >= _LIMIT:
            raise CaptureError(
                f"the step was captured {_LIMIT} times, and comes different again: a number it is "
                "called with or names, an attribute of a module, a function made anew, a size, or "
                "an option of its optimizer changes from call to call. All of them become part of "
                f"the graph: give numbers as tensors ({self._of_rates}), and pad inputs to fewer "
                "shapes"
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
    run as early as that lowers the peak. The function runs in Python once for each graph: what its
    code reads (numbers, functions, classes, attributes of objects, hooks of modules) is part of the
    graph and its key. A graph whose run changed something in Python (a counter, a scheduler,
    ``random``) is not run again. ::

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
        CaptureError: (at the first call) the step cannot be one graph.
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
    step, bound, effects = _trace(function, places, options, run=run)
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
            [*places.inputs, *_rate_tensors(places)], device, spec.granularity
        ),
        cost=f"{model.mode} on {spec.name}",
        replays_random=options.executor != "cudagraph",
    )
    notes = ["a whole step in one graph: loss, gradients, updates", *lowered.kept]
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
    return _Captured(graph, bound, plan, effects.changed, effects.flags)


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
    updated = {update.target for update in step.updates}
    fixed = frozenset(i for i, node in enumerate(step.inputs) if node in updated)
    copied = places.passed() - fixed
    static = [index not in copied for index in range(len(step.inputs))]
    return cudagraph.whole_step(step, made, static, inputs=places.inputs)


def _trace(
    function: Callable[..., Any], places: Places, options: Options, *, run: bool
) -> tuple[StepGraph, _Bound, SideEffects]:
    bound: list[_Bound] = []
    effects = SideEffects(places)
    # What runs, runs here, by the kernels of this device.
    capability = None if run else described_capability(options.device)
    routed = contextlib.nullcontext() if capability is None else RoutedAttention(capability)
    mode, tracks = dynamo.fake_mode(), torch.is_grad_enabled()
    count = len(places.inputs)
    groups = [group for group, _ in places.rates()]

    def flat(*given: Any) -> list[Any]:
        others, rates = list(given[:count]), [rate.item() for rate in given[count:]]
        with swapped(places, others, rates) as slots, torch.set_grad_enabled(tracks), routed:
            args, kwargs = slots.arguments()
            with effects.around_call(others, (args, kwargs)):
                result = function(*args, **kwargs)
                _check_rates(groups, rates)
                slots.refuse_new_bindings()
                slots.refuse_dropped_state()
                slots.refuse_other_sizes_and_hooks()
            outputs, found = _read(slots, result)
        bound.append(found)
        return outputs

    given = [*places.inputs, *_rate_tensors(places)]
    fakes = [tracing.fake_like(mode, tensor) for tensor in given]
    _TRACING.function = function
    try:
        with effects.watched():
            module = tracing.trace_functional(flat, fakes, places.paths)
    except RematError:
        raise
    except Exception as error:
        if (said := explained(error)) is None:
            raise
        raise said from error
    finally:
        _TRACING.function = None
    step = StepGraph.of(module)
    _check_aliases(step, places)
    effects.refuse_replayed_draws(any(ops.is_random(node) for node in step.nodes))
    return step, bound[0], effects


def _rate_tensors(places: Places) -> list[torch.Tensor]:
    return [torch.tensor(rate, dtype=torch.float64) for _, rate in places.rates()]


def _check_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        if group["lr"] is not rate:
            raise CaptureError(
                "the step changes the learning rate of its optimizer: call the scheduler outside "
                "the step; the rate is read anew in every call"
            )


def _read(slots: Swapped, result: Any) -> tuple[list[Any], _Bound]:
    """The outputs of the traced function, and what each is."""
    outputs: list[Any] = []
    returned: list[Any] = []

    def leaf(value: Any) -> tuple[str, Any]:
        if not isinstance(value, (torch.Tensor, *SYMBOLIC)):
            return "plain", value
        if (known := slots.input_of(value)) is not None:
            return "input", known
        if (alias := slots.alias_of(value)) is not None:
            return "alias", alias
        for index, output in enumerate(returned):
            if output is value:
                return "output", index
        returned.append(value)
        outputs.append(value.detach() if isinstance(value, torch.Tensor) else value)
        return "output", len(outputs) - 1

    leaves, tree = pytree.tree_flatten(result)
    for value in (*leaves, *slots.new_state().values()):
        _refuse_hidden(value)
    found = _Bound(
        [leaf(value) for value in leaves],
        tree,
        {index: leaf(value) for index, value in slots.new_gradients().items()},
        {entry: leaf(value) for entry, value in slots.new_state().items()},
    )
    return outputs, found


def _refuse_hidden(value: Any) -> None:
    """What a graph cannot make anew: a text with a number of the trace, tensors in an object."""
    if isinstance(value, str) and _SYMBOL.search(value):
        raise CaptureError(
            f"the step returns a text with a number that was read out of a tensor, {value!r:.60}, "
            "which is unknown while the step is traced: return the tensor, and write outside"
        )
    inside = value if isinstance(value, list | tuple | dict) else getattr(value, "__dict__", {})
    if not isinstance(value, torch.Tensor) and tensors_in(inside):
        raise CaptureError(
            f"the step returns, or leaves in its optimizer's state, a {type(value).__name__} with "
            "tensors in it, which cannot be filled anew: use tensors, or return tuples, lists and "
            "dicts of them (or register the class with torch.utils._pytree)"
        )


def _check_aliases(step: StepGraph, places: Places) -> None:
    """Refuse writes into an input whose memory another input shares."""
    updated = {node.name for update in step.updates for node in (update.target,)}
    storages = [tensor.untyped_storage()._cdata for tensor in places.inputs]
    for node, storage in zip(step.inputs, storages, strict=False):
        if node.name in updated and storages.count(storage) > 1:
            index = storages.index(storage)
            raise CaptureError(
                f"the step writes into a tensor of shape {tuple(places.inputs[index].shape)} whose "
                "memory another of its inputs shares; give each its own memory"
            )


def _run(captured: _Captured, places: Places) -> Any:
    with tracing.as_traced():
        outputs = captured.graph(*places.inputs, *_rate_tensors(places))
    bound = captured.bound

    def value(leaf: tuple[str, Any]) -> Any:
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
