"""What the code of a step can name: closure, globals, attributes of ``self``; and keys of it all.

Whatever a step reads and is no tensor becomes part of its graph, so it has to be part of the key
the graph is kept under: numbers by their value, all else by being the very same object.
"""

from __future__ import annotations

import dis
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

_NAMES: Final[weakref.WeakKeyDictionary[CodeType, frozenset[str]]] = weakref.WeakKeyDictionary()
_GLOBALS: Final[weakref.WeakKeyDictionary[CodeType, frozenset[str]]] = weakref.WeakKeyDictionary()
_OF_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
PLAIN: Final = (int, float, str, bool, type(None))
LONG: Final = 4096
"""Longer containers and arrays are data, told by their length: they are not read for every step."""
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
    if isinstance(item, set | frozenset) and settles(item):
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
    try:
        if isinstance(item, dict):
            return all(map(settles, item.values()))
        return isinstance(item, list | tuple | set | frozenset) and all(map(settles, item))
    except RecursionError:
        return False


def leaves_of(content: object) -> list[Any]:
    """The leaves of a tree; of a long list of numbers, a data set, its length; what holds itself is
    one leaf.
    """
    if isinstance(content, list | tuple | dict) and len(content) > LONG:
        first = next(iter(content.values() if isinstance(content, dict) else content))
        if isinstance(first, PLAIN):
            return [len(content)]
    try:
        return pytree.tree_leaves(content)
    except RecursionError:
        return [content]


def tensors_in(content: object) -> list[torch.Tensor]:
    """The tensors in a tree, in order."""
    return [leaf for leaf in leaves_of(content) if isinstance(leaf, torch.Tensor)]


def code_names(code: CodeType) -> frozenset[str]:
    """The names in a code object and in those of the functions it defines, and the texts in it that
    may be names for ``getattr``.
    """
    found = _NAMES.get(code)
    if found is None:
        texts = (x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
        inner = (item for item in code.co_consts if isinstance(item, CodeType))
        found = frozenset((*code.co_names, *texts)).union(*map(code_names, inner))
        _NAMES[code] = found
    return found


def global_names(code: CodeType) -> frozenset[str]:
    """The globals that a code object and those it defines read or write; not the attributes."""
    found = _GLOBALS.get(code)
    if found is None:
        own = {i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS}
        if "globals" in own:
            own |= {text for text in code.co_consts if isinstance(text, str)}
        inner = (item for item in code.co_consts if isinstance(item, CodeType))
        found = frozenset(own).union(*map(global_names, inner))
        _GLOBALS[code] = found
    return found


def names_of_first(code: CodeType) -> frozenset[str] | None:
    """The attributes that a method asks its first argument for; None where it is used otherwise,
    and may be asked for anything.
    """
    if not code.co_argcount:
        return None
    first, found = code.co_varnames[0], set()
    listed = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    for instruction, after in itertools.pairwise(listed):
        value = instruction.argval
        if value == first and instruction.opname == "MAKE_CELL":
            continue
        if value == first or (isinstance(value, tuple) and first in value):
            loads = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
            asks = after.opname.endswith(("_ATTR", "LOAD_METHOD"))
            if isinstance(value, tuple) or not loads or not asks:
                return None
            found.add(after.argval)
    return frozenset(found)
