"""One trace of a whole step: its graph, what it binds, and what it did beside.

The step is traced with all its tensors as inputs of a function: parameters, buffers, gradients,
optimizer state, arguments. What it returns, and what it binds anew (a gradient, a fresh entry of an
optimizer's state), are outputs; what it writes in place is updated in the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from remat.cost.device import described_capability
from remat.options import Options
from remat.passes import ops
from remat.passes.attention import RoutedAttention
from remat.passes.torch_private import dynamo, tracing
from remat.passes.whole_step import StepGraph
from remat.solvers.errors import CaptureError, RematError
from remat.step_contents import SYMBOLIC, typed
from remat.step_errors import explained
from remat.step_names import BY_VALUE, tensors_in
from remat.step_places import Places
from remat.step_side import SideEffects
from remat.step_swapped import Entry, Swapped, swapped

_TRACING: Final = threading.local()
_SYMBOL: Final = re.compile(r"\b(zuf|u)\d+\b")

Leaf = tuple[str, Any]


@dataclass(frozen=True)
class Bound:
    """What a step leaves behind beside its updates.

    Attributes:
        result: the returned tree: leaves are ``("input", i)``, ``("output", i)``, ``("alias",
            view of an input)`` or ``("plain", value)``.
        gradients: input → output that is its new ``.grad``, or None where it is dropped.
        state: entry of an optimizer's state → leaf, as in ``result``.
    """

    result: list[Leaf]
    tree: Any
    gradients: dict[int, Leaf]
    state: dict[Entry, Leaf]


@dataclass(frozen=True)
class Account:
    """All that came out of a trace, to be compared with another; the graph itself is planned and
    rewritten.

    Attributes:
        lines: of the graph, see :attr:`remat.passes.joint.JointGraph.lines`.
        constants: digests of the contents of its constant tensors.
        left: what is returned, bound and switched.
    """

    lines: tuple[str, ...]
    constants: tuple[str, ...]
    left: tuple[Any, ...]


@dataclass(frozen=True)
class Traced:
    """A step that was traced."""

    step: StepGraph
    bound: Bound
    effects: SideEffects

    @cached_property
    def account(self) -> Account:
        """Before the graph is rewritten."""
        bound = self.bound
        left = (
            [_told(leaf) for leaf in bound.result],
            bound.tree,
            {index: _told(leaf) for index, leaf in bound.gradients.items()},
            {entry: _told(leaf) for entry, leaf in bound.state.items()},
            self.effects.flags,
        )
        return Account(self.step.lines, self._constants(), left)

    def _constants(self) -> tuple[str, ...]:
        module = self.step.module
        held = [
            getattr(module, str(node.target), None)
            for node in self.step.nodes
            if node.op == "get_attr"
        ]
        return tuple(_digest(item) for item in held if isinstance(item, torch.Tensor))

    def difference(self, before: Account) -> str:
        """Where it came out otherwise than the trace before, for people; empty if nowhere."""
        now = self.account
        if now.lines != before.lines:
            return self._first_other_line(before.lines)
        if now.constants != before.constants:
            return "a tensor that it makes out of numbers holds others"
        return "" if now.left == before.left else "it returns, binds or switches something else"

    def _first_other_line(self, before: tuple[str, ...]) -> str:
        pairs = enumerate(zip(self.step.lines, before, strict=False))
        first = next(index for index, (one, other) in pairs if one != other)
        said = f"first `{_short(before[first])}`, now `{_short(self.step.lines[first])}`"
        node = dict(enumerate(self.step.nodes, 1)).get(first)
        trace = "" if node is None else node.meta.get("stack_trace", "")
        return ", ".join([said, *(line.strip() for line in trace.strip().splitlines()[:1])])


def _short(line: str) -> str:
    return line if len(line) <= 100 else line[:100] + "…"


def _told(leaf: Leaf) -> object:
    """What is made anew in every call is told by its type."""
    kind, value = leaf
    if kind != "plain":
        return leaf
    return kind, typed(value) if isinstance(value, BY_VALUE) else type(value)


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def is_tracing() -> bool:
    """Whether a step is being traced in this thread."""
    return getattr(_TRACING, "function", None) is not None


def trace(function: Callable[..., Any], places: Places, options: Options, *, run: bool) -> Traced:
    bound: list[Bound] = []
    effects = SideEffects(places)
    # What runs, runs here, by the kernels of this device.
    capability = None if run else described_capability(options.device)
    routed = contextlib.nullcontext() if capability is None else RoutedAttention(capability)
    mode, tracks = dynamo.fake_mode(), torch.is_grad_enabled()
    count = len(places.inputs)
    groups = [group for group, _ in places.rates()]

    def flat(*given: Any) -> list[Any]:
        others, rates = list(given[:count]), [rate.item() for rate in given[count:]]
        for tensor, other in zip(places.inputs, others, strict=True):
            vars(other).update(vars(tensor))  # p.no_decay = True
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

    given = [*places.inputs, *rate_tensors(places)]
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
    return Traced(step, bound[0], effects)


def rate_tensors(places: Places) -> list[torch.Tensor]:
    return [torch.tensor(rate, dtype=torch.float64) for _, rate in places.rates()]


def _check_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        if group["lr"] is not rate:
            raise CaptureError(
                "the step changes the learning rate of its optimizer: call the scheduler outside "
                "the step; the rate is read anew in every call"
            )


def _read(slots: Swapped, result: Any) -> tuple[list[Any], Bound]:
    """The outputs of the traced function, and what each is."""
    outputs: list[Any] = []
    returned: list[Any] = []

    def leaf(value: Any) -> Leaf:
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
    found = Bound(
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
