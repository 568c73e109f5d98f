"""What the code of a step can name: closure, globals, attributes of ``self``; and keys of it all.

Whatever a step reads and is no tensor becomes part of its graph, so it has to be part of the key
the graph is kept under: numbers by their value, all else by being the very same object.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.solvers.errors import InvalidOption

PLAIN: Final = (int, float, str, bool, type(None))
BY_VALUE: Final = (*PLAIN, bytes, complex, torch.device, torch.dtype)
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType, partial)


@dataclass(frozen=True)
class Holder:
    """A name that a function reads.

    Attributes:
        name: for people.
        place: tells it from all others.
        content: what it means; ``get`` asks what it means now, ``put`` makes it mean something
            else.
    """

    name: str
    place: tuple[int, str]
    content: Any
    get: Callable[[], Any]
    put: Callable[[Any], None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors it means, or those in the containers it means."""
        return tensors_in(self.content)

    @staticmethod
    def in_dict(names: dict[str, Any], name: str) -> Holder:
        """An entry of a dictionary of names."""
        put = partial(names.__setitem__, name)
        return Holder(name, (id(names), name), names[name], partial(names.get, name), put)


class Same:
    """A key: equal to that of the same object, as long as that object lives.

    An id alone will not do: it is given to other objects afterwards.
    """

    __slots__ = ("_id", "_item")

    @property
    def number(self) -> int:
        """The id."""
        return self._id

    def __init__(self, item: object) -> None:
        self._id = id(item)
        self._item: Callable[[], object]
        try:
            self._item = weakref.ref(item)
        except TypeError:
            self._item = lambda: item  # it lives as long as its key

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        item = self._item()
        return isinstance(other, Same) and item is not None and item is other._item()


def described(item: object) -> object:
    """The part of a key that says what ``item`` is: 1, 1.0 and True are three things."""
    if isinstance(item, BY_VALUE):
        return type(item).__name__, repr(item) if isinstance(item, float) else item
    if isinstance(item, MethodType):  # each access makes another
        return Same(item.__self__), Same(item.__func__)
    if isinstance(item, tuple | list):
        return type(item).__name__, tuple(map(described, item))
    if isinstance(item, set | frozenset) and all(isinstance(x, BY_VALUE) for x in item):
        return type(item).__name__, frozenset(map(described, item))
    if isinstance(item, dict):
        return tuple((described(key), described(value)) for key, value in item.items())
    return Same(item)


def settles(item: object) -> bool:
    """Whether what ``item`` is decides what a step does, and is told by a key: numbers, functions,
    and containers of them. Tensors, modules and other objects are looked at elsewhere, or not.
    """
    if isinstance(item, (*BY_VALUE, *_FUNCTIONS)):
        return True
    if isinstance(item, dict):
        return all(map(settles, item.values()))
    return isinstance(item, list | tuple | set | frozenset) and all(map(settles, item))


def tensors_in(content: object) -> list[torch.Tensor]:
    """The tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, torch.Tensor)]


def reach(
    function: Callable[..., Any], state: object
) -> tuple[list[object], list[Holder], frozenset[str]]:
    """What a function can reach: (modules and optimizers, by name or in ``state``; all that it can
    name; all names in its code, and in that of the functions it names).

    Raises:
        InvalidOption: ``state`` holds something else.
    """
    found: list[object] = []
    for leaf in pytree.tree_leaves(state):
        if not isinstance(leaf, nn.Module | torch.optim.Optimizer):
            raise InvalidOption(
                f"state= takes modules, optimizers and containers of them, and {leaf!r:.60} is "
                "none; hand tensors over as arguments"
            )
        found.append(leaf)
    mentioned: set[str] = set()
    holders = {holder.place: holder for holder in _named(function, set(), mentioned)}
    for holder in holders.values():
        leaves = pytree.tree_leaves(holder.content)
        found += [item for item in leaves if isinstance(item, nn.Module | torch.optim.Optimizer)]
    return found, list(holders.values()), frozenset(mentioned)


def _named(function: Callable[..., Any], seen: set[int], mentioned: set[str]) -> Iterator[Holder]:
    """What the code of a function can name; and what the functions it names so can name."""
    inner: Any = getattr(function, "__func__", function)
    if id(inner) in seen:
        return
    seen.add(id(inner))
    code = getattr(inner, "__code__", None)
    names = set() if code is None else code_names(code)
    mentioned |= names
    for holder in (*_of_self(function, names), *_of_code(inner, names)):
        yield holder
        if _is_followed(holder.content):
            yield from _named(holder.content, seen, mentioned)
        elif (call := _called(holder.content)) is not None:
            yield from _named(call, seen, mentioned)
    bound = getattr(function, "__self__", None)
    if bound is None or isinstance(bound, nn.Module | torch.optim.Optimizer):
        return
    for name in names:
        method = getattr(type(bound), name, None)
        method = method.fget if isinstance(method, property) else method
        if isinstance(method, FunctionType):
            yield from _named(MethodType(method, bound), seen, mentioned)


def _called(content: object) -> MethodType | None:
    """How an object of the caller's is called; modules and torch's own are looked at elsewhere."""
    method = vars(type(content)).get("__call__")
    if not isinstance(method, FunctionType) or isinstance(content, nn.Module):
        return None
    return (
        None if str(method.__module__).startswith(("torch", "remat")) else method.__get__(content)
    )


def _is_followed(content: object) -> bool:
    if not isinstance(content, FunctionType | MethodType):
        return False
    return not str(content.__module__).startswith("torch")


def _of_self(function: Callable[..., Any], names: set[str]) -> Iterator[Holder]:
    bound = getattr(function, "__self__", None)
    if isinstance(bound, nn.Module | torch.optim.Optimizer):
        yield Holder("self", (id(bound), ""), bound, lambda: bound, lambda _: None)
    elif hasattr(bound, "__dict__"):
        attributes = vars(bound)
        yield from (Holder.in_dict(attributes, name) for name in names if name in attributes)
        kind = type(bound)
        for name in names - attributes.keys():
            content = getattr(kind, name, None)
            if isinstance(content, PLAIN) and content is not None:
                yield Holder(name, (id(kind), name), content, partial(getattr, kind, name), _keep)


def _keep(_: Any) -> None:
    """Numbers of a class, and defaults, stay what they are."""


def _of_code(inner: Any, names: set[str]) -> Iterator[Holder]:
    code, known = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    free = () if code is None else code.co_freevars
    for name, cell in zip(free, getattr(inner, "__closure__", None) or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # it is not filled yet
            continue
        get, put = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
        yield Holder(name, (id(cell), ""), content, get, put)
    yield from (Holder.in_dict(known, name) for name in names if name in known)
    if code is not None:
        yield from _defaults(inner, code)


def _defaults(inner: Any, code: CodeType) -> Iterator[Holder]:
    """What stands for arguments that a call leaves out."""
    values = getattr(inner, "__defaults__", None) or ()
    last = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    named = dict(zip(last, values, strict=True)) | (getattr(inner, "__kwdefaults__", None) or {})
    for name, content in named.items():
        yield Holder(name, (id(inner), name), content, partial(named.get, name), _keep)


def code_names(code: CodeType) -> set[str]:
    """The names in a code object and in those of the functions it defines."""
    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*map(code_names, inner))
