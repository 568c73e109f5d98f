"""What the graph of a step is kept under: all that it depends on, but for contents of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.step_contents import Walk, contents
from remat.step_names import PLAIN, Same, described, leaves_of, settles
from remat.step_places import HELD, Places

_ROOTS: Final = (nn.Module, torch.optim.Optimizer)


class Section(NamedTuple):
    """Part of a key.

    Attributes:
        kind: one of :data:`_WORDS`.
        which: the name, the number of the module or of the optimizer that it is of.
        entries: what it says.
    """

    kind: str
    which: str | int
    entries: tuple[Any, ...]


Key = tuple[Section, ...]

_WORDS: Final = {
    "tensors": "the size, dtype, strides or requires_grad of a tensor",
    "gradients": "which tensors have a gradient when it is called",
    "memory": "which tensors share memory",
    "arguments": "a number, a function, an object or the nesting of its arguments",
    "modes": "autocast, the grad mode or the default dtype",
}


def signature(places: Places) -> Key:
    """The key of a call."""
    tensors = places.inputs
    first: dict[int, int] = {}
    memory = (first.setdefault(t.untyped_storage()._cdata, i) for i, t in enumerate(places.inputs))
    return (
        Section("tensors", "", tuple(_metadata(tensor) for tensor in tensors)),
        Section("gradients", "", tuple(_gradient(places, tensor) for tensor in tensors)),
        Section("memory", "", tuple(memory)),
        Section("arguments", "", tuple(_of_arguments(places))),
        *_of_names(places),
        *_of_modules(places),
        *_of_optimizers(places),
        Section("modes", "", tuple(_modes())),
    )


def difference(one: Key, other: Key, places: Places) -> str:
    """What tells two keys apart, for people; ``places`` are those of the last call."""
    for before, now in zip(one, other, strict=False):
        if before[:2] != now[:2]:
            break
        if before != now:
            return _in_words(before, now, places)
    return "which names, modules and optimizers it reaches"


def _in_words(before: Section, now: Section, places: Places) -> str:
    if now.kind in _WORDS:
        return _WORDS[now.kind]
    if now.kind == "name":
        return f"what {now.which} is, or holds"
    named = (
        entry[0]
        for entry, old in zip(now.entries, before.entries, strict=False)
        if entry != old and isinstance(entry, tuple) and entry and isinstance(entry[0], str)
    )
    what = next(named, "the options and state" if now.kind == "optimizer" else "an attribute")
    assert isinstance(now.which, int)
    if now.kind == "optimizer":
        return f"{what} of {type(places.optimizers[now.which]).__name__}"
    part = places.parts[now.which]
    return f"{what} of {places.paths.get(part) or type(part).__name__}"


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    form = tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    said = tuple((k, described(v)) for k, v in vars(tensor).items() if isinstance(v, PLAIN))
    return *form, tensor.requires_grad, tensor.is_leaf, said


def _gradient(places: Places, tensor: torch.Tensor) -> int | None:
    return places.index(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None


def _of_arguments(places: Places) -> Iterator[object]:
    leaves, spec = pytree.tree_flatten(places.arguments)
    yield str(spec)
    yield tuple(_describe(places, leaf) if _is_told(leaf) else None for leaf in leaves)
    yield from _unsettled(places, leaves)


def _describe(places: Places, leaf: object) -> object:
    found = places.index(leaf)
    return described(leaf) if found is None else ("input", found)


def _of_names(places: Places) -> Iterator[Section]:
    """Tensors, numbers, functions, modules; of other objects what the code asks them for."""
    for holder in places.holders:
        leaves = leaves_of(holder.content)
        told: list[object] = [tuple(_describe(places, leaf) for leaf in leaves if _is_told(leaf))]
        if len(leaves) > 1 or (leaves and isinstance(holder.content, list | tuple | dict)):
            told.append(_structure(holder.content))
        yield Section("name", holder.name, (*told, *_unsettled(places, leaves)))


def _unsettled(places: Places, leaves: Iterable[object]) -> Iterator[object]:
    """What objects hold, and are told by no key of their own."""
    for leaf in leaves:
        if isinstance(leaf, type):
            yield Same(leaf)
        if not _is_told(leaf):
            yield Same(type(leaf))
            yield tuple(contents(leaf, places.names))


def _of_modules(places: Places) -> Iterator[Section]:
    walk = Walk(places.names_of_modules, all_numbers=True)
    kinds: set[type] = set()
    for number, part in enumerate(places.parts):
        entries: list[object] = [Same(part), *_slots(places, part)]
        for name, value in vars(part).items():
            if isinstance(value, PLAIN):
                entries.append((name, described(value)))
            elif isinstance(value, torch.Tensor):
                entries.append((name, places.index(value)))
            elif name in HELD or (isinstance(value, dict) and not value):
                continue  # hooks are functions in dicts; most of these are empty
            elif settles(value):
                entries.append((name, described(value)))
            else:
                entries.append((name, tuple(walk.through(value))))
        if type(part) not in kinds:
            kinds.add(type(part))
            entries += _of_class(type(part))
        yield Section("module", number, tuple(entries))


def _slots(places: Places, part: nn.Module) -> Iterator[object]:
    for held in (part._parameters, part._buffers):
        yield tuple((name, places.index(value)) for name, value in held.items())
    yield tuple((name, id(child)) for name, child in part._modules.items())


def _of_class(kind: type) -> Iterator[object]:
    """Numbers and functions of the caller's classes; torch's stay as they are."""
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            for name, value in vars(base).items():
                if not name.startswith("__") and settles(value):
                    yield name, described(value)


def _of_optimizers(places: Places) -> Iterator[Section]:
    for number, optimizer in enumerate(places.optimizers):
        entries: list[object] = [Same(optimizer)]
        for name, value in vars(optimizer).items():
            if not name.startswith("_") and name not in ("param_groups", "state", "defaults"):
                entries.append((name, tuple(contents(value, places.names))))
        hooks = (v for k, v in vars(optimizer).items() if k.endswith("_hooks") and v)
        entries.append(tuple(described(held) for held in hooks if settles(held)))
        for group in optimizer.param_groups:
            entries += [
                (name, _describe(places, value))
                for name, value in group.items()
                if name != "params" and not (name == "lr" and places.lifts(group))
            ]
            entries.append(tuple(map(places.index, group["params"])))
        for parameter, state in optimizer.state.items():
            told = tuple((key, _describe(places, value)) for key, value in state.items())
            entries.append((places.index(parameter), told))
        yield Section("optimizer", number, tuple(entries))


def _structure(content: object) -> str:
    """How a tree is built; nothing of what is told by its length, or holds itself."""
    leaves = leaves_of(content)
    if leaves and (leaves[0] is content or leaves == [len(content)]):  # type: ignore[arg-type]
        return ""
    return str(pytree.tree_structure(content))


def _is_told(leaf: object) -> bool:
    """Whether a leaf has a description of its own, and is not looked into."""
    return isinstance(leaf, (torch.Tensor, *_ROOTS)) or settles(leaf)


def _modes() -> Iterator[object]:
    for device_type in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(device_type)
        yield on, torch.get_autocast_dtype(device_type) if on else None
    yield torch.get_default_dtype()
    yield torch.is_grad_enabled()
