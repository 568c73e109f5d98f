"""What a step can read that is no tensor: numbers, in containers and objects, however deep.

One walk serves two ends. What it finds is part of the key a graph is kept under, so that a change
from outside makes another graph; and what a trace changes of it would never change again.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import enum
import fractions
import functools
import inspect
import io
import operator
import random
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from remat.solvers.errors import CaptureError
from remat.step_names import BY_VALUE, LONG, PLAIN, Same, code_names, described, settles
from remat.step_reach import functions_of, implicit, is_package

SYMBOLIC: Final = (torch.SymFloat, torch.SymInt, torch.SymBool)
A_TENSOR: Final = "a tensor"
KEYED: Final = "tensors as keys"
UNKNOWN: Final = "an iterator that does not tell its place"
_VALUES: Final = (*BY_VALUE, enum.Enum, decimal.Decimal, fractions.Fraction, range, slice)
_ELSEWHERE: Final = (nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Generator)
_CALLED: Final = (FunctionType, MethodType, BuiltinFunctionType)
_NAMED: Final = (FunctionType, MethodType, ModuleType)
_MENTIONED: Final[weakref.WeakKeyDictionary[type, frozenset[str]]] = weakref.WeakKeyDictionary()
_DEPTH: Final = 6
_MOST: Final = 200_000
"""Looked at in every call: more would take longer than what they settle."""

Found = tuple[str, object]


def contents(item: object, names: frozenset[str], *, moving: bool = False) -> list[Found]:
    """(path, value) of all numbers that code with these names finds in ``item``.

    Args:
        names: the attributes of objects that the code mentions; others it cannot ask for.
        moving: the states of random generators and iterators as well, which move by being used.
    """
    return list(Walk(names, moving).through(item))


class Walk:
    """Through several things, each once, however often it is met."""

    def __init__(
        self, names: frozenset[str], moving: bool = False, *, all_numbers: bool = False
    ) -> None:
        self.names = names
        self.moving = moving
        # Code of torch's or a package's may ask for what the step does not mention.
        self.all_numbers = moving or all_numbers
        self._seen: set[int] = set()
        self._met = 0

    def through(self, item: Any, path: str = "", depth: int = _DEPTH) -> Iterator[Found]:
        """See :func:`contents`; ``path`` leads to ``item``, ``depth`` is how deep to go.

        Raises:
            CaptureError: it is a data set.
        """
        self._met += 1
        if self._met > _MOST:
            raise CaptureError(
                f"the step reaches an object that holds more than {_MOST:,} numbers and objects "
                f"(at {path[:60]}), and would read all of them in every call: hand over as "
                "arguments what it needs of them, in tensors"
            )
        if isinstance(item, (*_VALUES, *SYMBOLIC)):
            yield path, typed(item)
            return
        if self.moving and isinstance(item, torch.Tensor):
            yield path, (A_TENSOR, id(item))
        if type(item) in weakref.ProxyTypes:
            return
        if isinstance(item, (nn.Module, torch.optim.Optimizer, torch.Generator, type, *_CALLED)):
            yield path, described(item)
        if isinstance(item, nn.Module):
            yield from _modes(item, path, switches=not self.moving)
        if isinstance(item, _ELSEWHERE) or depth == 0 or id(item) in self._seen:
            return
        self._seen.add(id(item))
        if _is_array(item):
            yield path, _array(item)
        elif isinstance(item, Mapping | Sequence | Set | collections.deque):
            yield from self._container(item, path, depth)
        elif isinstance(item, functools.partial):
            yield from self.through((item.func, item.args, item.keywords), path, depth)
        elif _is_moving(item):
            if self.moving:
                yield path, _state(item)
        else:
            yield from self._attributes(item, path, depth)

    def _container(self, item: Any, path: str, depth: int) -> Iterator[Found]:
        yield path, (type(item).__name__, len(item))
        if len(item) > LONG or isinstance(item, str | bytes | memoryview):
            return
        if self.moving and any(isinstance(part, torch.Tensor) for part in item if _is_keyed(item)):
            yield path, KEYED
        if isinstance(item, Set):
            yield path, frozenset(map(_member, item))
            return
        parts = list(item.items()) if isinstance(item, Mapping) else list(enumerate(item))
        for key, value in parts:
            name = f"{path}[{typed(key) if isinstance(key, _VALUES) else Same(key).number!r}]"
            yield name, "is there"
            yield from self.through(value, name, depth - 1)

    def _attributes(self, item: Any, path: str, depth: int) -> Iterator[Found]:
        if isinstance(item, ModuleType) and is_package(item.__name__):
            return
        held = _attributes_of(item)
        if not isinstance(item, (type, *_NAMED)):
            # What shows nothing (a compiled pattern, an op of torch's) is told by being itself.
            opaque = not hasattr(item, "__dict__") and not any(_slots(type(item)))
            yield path, Same(item if opaque else type(item))
        if isinstance(item, type):
            held = {name: value for name, value in held.items() if not callable(value)}
        elif not isinstance(item, _NAMED) and not is_package(type(item).__module__):
            self.names |= _names_of_methods(type(item), self.names)
            for name in _slots(type(item)):
                slot = inspect.getattr_static(type(item), name, None)
                with contextlib.suppress(AttributeError, TypeError):
                    held[name] = slot.__get__(item)
        asked = held.keys() & self.names
        if self.all_numbers and not isinstance(item, (type, *_NAMED)):
            asked |= {name for name, value in held.items() if issubclass(type(value), _VALUES)}
        for name in sorted(asked):
            yield from self.through(held[name], f"{path}.{name}", depth - 1)


def _is_keyed(item: object) -> bool:
    return isinstance(item, Mapping | Set)


def _member(part: object) -> object:
    values = isinstance(part, _VALUES) or (isinstance(part, tuple) and settles(part))
    return described(part) if values else Same(part)


def _modes(module: nn.Module, path: str, *, switches: bool) -> Iterator[Found]:
    """What a module in an object is set to; without its switches, which a step may turn."""
    for name, part in module.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, PLAIN)}
        if not switches:
            plain.pop("training", None)
        yield f"{path}.{name}", tuple((key, typed(value)) for key, value in plain.items())


def _attributes_of(item: object) -> dict[str, Any]:
    """As they lie there: objects that make up attributes are not asked."""
    try:
        return dict(object.__getattribute__(item, "__dict__"))
    except (AttributeError, TypeError):
        return dict(vars(item)) if isinstance(item, type) else {}


def _slots(kind: type) -> tuple[str, ...]:
    slots = (getattr(base, "__slots__", ()) for base in kind.__mro__)
    return tuple(name for s in slots for name in ((s,) if isinstance(s, str) else s))


def typed(value: Any) -> Any:
    """Numbers that compare equal may be different things; numbers of the trace are themselves."""
    return value if isinstance(value, SYMBOLIC) else (type(value).__name__, repr(value))


def _is_array(item: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(item, numpy.ndarray | numpy.generic)


def _array(item: Any) -> object:
    if item.size > LONG or item.dtype.hasobject:
        return str(item.dtype), item.shape
    return str(item.dtype), item.shape, item.tobytes()


def _is_moving(item: object) -> bool:
    """Random generators, and iterators whose place is in no attribute; files are no iterators."""
    numpy = sys.modules.get("numpy")
    generators: tuple[type, ...] = (random.Random, GeneratorType)
    if numpy is not None:
        generators = (*generators, numpy.random.Generator, numpy.random.RandomState)
    if isinstance(item, generators):
        return True
    own = isinstance(getattr(type(item), "__next__", None), FunctionType)
    iterates = hasattr(type(item), "__next__") and not isinstance(item, io.IOBase)
    return iterates and not (own and "__next__" in implicit(type(item)))


def _state(item: Any) -> object:
    if isinstance(item, random.Random):
        return item.getstate()
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals))
    if hasattr(item, "bit_generator"):
        return repr(item.bit_generator.state)
    if hasattr(item, "get_state"):
        return repr(item.get_state())
    if isinstance(item, enumerate):
        return item.__reduce__()[1][1]
    written, left = repr(item), operator.length_hint(item, -1)
    return (written, left) if left >= 0 or f"{id(item):x}" not in written.lower() else UNKNOWN


def names_in_methods(kind: type) -> frozenset[str]:
    """What the methods of a class mention, as far as they are the caller's."""
    found = _MENTIONED.get(kind)
    if found is None:
        methods = functions_of(kind)
        found = frozenset[str]().union(*(code_names(method.__code__) for method in methods))
        _MENTIONED[kind] = found
    return found


def _names_of_methods(kind: type, mentioned: frozenset[str]) -> frozenset[str]:
    """What the methods that are mentioned mention, and those they call."""
    found, asked = set(mentioned), {"__call__", *implicit(kind), *mentioned}
    looked: set[str] = set()
    while asked - looked:
        name = (asked - looked).pop()
        looked.add(name)
        method = getattr(kind, name, None)
        method = method.fget if isinstance(method, property) else method
        if isinstance(method, FunctionType):
            new = code_names(method.__code__)
            found |= new
            asked |= new
    return frozenset(found)
