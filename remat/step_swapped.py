"""The tensors of a step's trace in the places of its own, and what the step binds anew there."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from remat.passes.torch_private.autograd import has_hooks
from remat.solvers.errors import CaptureError
from remat.step_names import PLAIN, Holder, tensors_in

if TYPE_CHECKING:
    from remat.step_places import Places


@dataclass(frozen=True)
class Entry:
    """An entry of an optimizer's state: of the parameter ``parameter`` (an input), by ``key``."""

    optimizer: int
    parameter: int
    key: str


@dataclass(frozen=True)
class Alias:
    """A view of an input, which shows what is written into it later; it begins ``offset`` elements
    behind where the input does.
    """

    input: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """The view of the input as it is now."""
        tensor = inputs[self.input].detach()
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@contextlib.contextmanager
def swapped(places: Places, others: list[torch.Tensor], rates: list[Any]) -> Iterator[Swapped]:
    """Every slot holds ``others[i]`` instead of input ``i``, and the groups ``rates``."""
    made = Swapped(places, others)
    undo: list[Callable[[], None]] = []
    try:
        undo += [_swap_holder(holder, made) for holder in places.holders if holder.tensors]
        undo += _swap_modules(places, made)
        undo += _swap_optimizers(places, made, rates)
        for tensor, other in zip(places.inputs, others, strict=True):
            if tensor.is_leaf and other.is_leaf:
                other.grad = None if tensor.grad is None else made.of(tensor.grad)
        made.bound = made.now_bound()
        yield made
    finally:
        for restore in reversed(undo):
            restore()


@dataclass
class Swapped:
    """The tensors that stand in the slots for the time being.

    Attributes:
        bound: what :meth:`now_bound` said before the step ran.
    """

    places: Places
    others: list[torch.Tensor]
    bound: dict[str, list[int]] = field(default_factory=dict)
    _states: list[Mapping[Any, Any]] = field(default_factory=list)

    def of(self, tensor: Any) -> Any:
        """What stands for ``tensor``; itself if it is no input."""
        found = self.places.index(tensor)
        return tensor if found is None else self.others[found]

    def arguments(self) -> Any:
        """(args, kwargs) with what stands for their tensors."""
        return pytree.tree_map(self.of, self.places.arguments)

    def input_of(self, other: object) -> int | None:
        """Which input ``other`` stands for, or None."""
        return next((i for i, item in enumerate(self.others) if item is other), None)

    def alias_of(self, value: object) -> Alias | None:
        """The view of an input that ``value`` is, or None."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = value.untyped_storage()._cdata
        for number, other in enumerate(self.others):
            if other.untyped_storage()._cdata == storage and other.dtype == value.dtype:
                shape, stride = tuple(value.shape), tuple(value.stride())
                begins = int(value.storage_offset()) - int(other.storage_offset())
                return Alias(number, shape, stride, begins)
        return None

    def now_bound(self) -> dict[str, list[int]]:
        """Which tensors the names mean that outlive a step, and in which memory these lie.

        An input and what stands for it are one: an LSTM has its parameters in a list of its own.
        """
        found: dict[str, list[int]] = {}
        for holder in self.places.holders:
            found.setdefault(holder.name, []).extend(self._identities(holder.get()))
        for part in self.places.parts:
            path = self.places.paths.get(part) or type(part).__name__
            names = {**vars(part), **part._parameters, **part._buffers}
            for name, value in names.items():
                if name not in ("_modules", "_parameters", "_buffers"):
                    found.setdefault(f"{path}.{name}", []).extend(self._identities(value))
            found[f"{path}'s modules"] = [id(child) for child in part._modules.values()]
        for optimizer in self.places.optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                for name, value in group.items():
                    found.setdefault(f"{name!r} of {kind}", []).extend(self._identities(value))
        return found

    def _identities(self, content: object) -> list[int]:
        """Of tensors; ``x.data = y`` leaves the tensor and gives it other memory."""
        found: list[int] = []
        for tensor in tensors_in(content):
            index = self.places.index(tensor)
            other = tensor if index is None else self.others[index]
            found += [id(other), other.untyped_storage()._cdata]
        return found

    def refuse_new_bindings(self) -> None:
        """What a step binds anew is bound while it is traced, and never again.

        Raises:
            CaptureError: a name means another tensor than before, or a tensor has other memory.
        """
        now = self.now_bound()
        for name in dict.fromkeys((*self.bound, *now)):
            if now.get(name, []) != self.bound.get(name, []):
                raise CaptureError(
                    f"the step leaves another tensor in {name} than was there, which a graph "
                    "cannot do: write into the tensor that is there (copy_; register a buffer for "
                    "it), or return the new one"
                )

    def refuse_other_sizes_and_hooks(self) -> None:
        """Resizing, and hooks on what stands for a tensor, would not be done again.

        Raises:
            CaptureError: the step did either.
        """
        for tensor, other in zip(self.places.inputs, self.others, strict=True):
            if has_hooks(other):
                raise CaptureError(
                    f"the step leaves a hook on a tensor of shape {tuple(tensor.shape)}, which its "
                    "graph would not do again: hang it there outside, or remove it in the step"
                )
            if tensor.untyped_storage().nbytes() != other.untyped_storage().nbytes():
                raise CaptureError(
                    f"the step resizes a tensor of shape {tuple(tensor.shape)}, which a graph "
                    "cannot do: resize it outside"
                )

    def refuse_dropped_state(self) -> None:
        """Entries of an optimizer's state that a step deletes would be there again.

        Raises:
            CaptureError: an entry is no longer there.
        """
        for number, optimizer in enumerate(self.places.optimizers):
            for parameter, entries in self._states[number].items():
                now = optimizer.state.get(self.of(parameter), {})
                if not entries.keys() <= now.keys():
                    raise CaptureError(
                        f"the step drops state of its {type(optimizer).__name__}, which its graph "
                        "would not do: drop it outside"
                    )

    def new_gradients(self) -> dict[int, torch.Tensor | None]:
        """Inputs whose ``.grad`` is another object than before, and what it is."""
        found: dict[int, torch.Tensor | None] = {}
        for index, (tensor, other) in enumerate(zip(self.places.inputs, self.others, strict=True)):
            if not (tensor.is_leaf and other.is_leaf):
                continue
            before = None if tensor.grad is None else self.of(tensor.grad)
            if other.grad is not before:
                found[index] = other.grad
        return found

    def new_state(self) -> dict[Entry, Any]:
        """Entries of optimizers' states that are other objects than before, tensors or numbers."""
        found: dict[Entry, Any] = {}
        for number, optimizer in enumerate(self.places.optimizers):
            for parameter, state in optimizer.state.items():
                index = self.input_of(parameter)
                if index is None:
                    continue
                before = self._before(number, index)
                for key, value in state.items():
                    known = before.get(key, found)
                    same = self.of(known) is value or (type(value) in PLAIN and known == value)
                    if not same:
                        found[Entry(number, index, key)] = value
        return found

    def _before(self, number: int, index: int) -> Mapping[str, Any]:
        states: Mapping[Any, Any] = self._states[number]
        return states.get(self.places.inputs[index], {})


def _swap_holder(holder: Holder, swapped: Swapped) -> Callable[[], None]:
    holder.put(pytree.tree_map(swapped.of, holder.content))
    return partial(holder.put, holder.content)


def _swap_modules(places: Places, swapped: Swapped) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for part in places.parts:
        for held in (part._parameters, part._buffers):
            before: dict[str, Any] = dict(held)
            undo.append(partial(_refill, held, before))
            held.update({name: swapped.of(value) for name, value in before.items()})
        undo.append(partial(_refill, part._modules, dict(part._modules)))
        undo.append(partial(_drop_new, vars(part), dict(vars(part))))
    return undo


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


def _refill_list(held: list[Any], before: list[Any]) -> None:
    held[:] = before


def _drop_new(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Where a step has bound attributes to tensors of the trace, they are as before."""
    for name in list(attributes):
        if attributes[name] is not before.get(name) and tensors_in(attributes[name]):
            del attributes[name]
            attributes.update({name: before[name]} if name in before else {})


def _swap_optimizers(
    places: Places, swapped: Swapped, rates: list[Any]
) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for (group, before), rate in zip(places.rates(), rates, strict=True):
        undo.append(partial(group.__setitem__, "lr", before))
        group["lr"] = rate
    for optimizer in places.optimizers:
        undo.append(partial(_refill_list, optimizer.param_groups, list(optimizer.param_groups)))
        state = optimizer.state
        swapped._states.append(state)
        undo.append(partial(setattr, optimizer, "state", state))
        entries = {
            swapped.of(parameter): {key: swapped.of(value) for key, value in held.items()}
            for parameter, held in state.items()
        }
        optimizer.state = defaultdict(dict, entries)
        for group in optimizer.param_groups:
            params = group["params"]
            undo.append(partial(group.__setitem__, "params", params))
            group["params"] = [swapped.of(parameter) for parameter in params]
            for key, value in group.items():
                if places.index(value) is not None:  # a learning rate that is a tensor
                    undo.append(partial(group.__setitem__, key, value))
                    group[key] = swapped.of(value)
    return undo
