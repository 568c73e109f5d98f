"""What the code of a step can name, and what the functions it names so can name.

Closures, globals, defaults, attributes of ``self``; through functions, methods, callable objects,
partial functions, the caller's Python modules, and the ``forward`` and hooks of modules.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.solvers.errors import InvalidOption
from remat.step_names import PLAIN, Holder, code_names, global_names, leaves_of, names_of_first

_ROOTS: Final = (nn.Module, torch.optim.Optimizer)
_HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_FOREIGN: Final[weakref.WeakKeyDictionary[type, bool]] = weakref.WeakKeyDictionary()
_IMPLICIT: Final[weakref.WeakKeyDictionary[type, frozenset[str]]] = weakref.WeakKeyDictionary()
_NOT_RUN: Final = frozenset(
    f"__{name}__"
    for name in ("init", "new", "post_init", "init_subclass", "del", "repr", "hash", "reduce",
                 "reduce_ex", "getstate", "setstate", "copy", "deepcopy")
)  # fmt: skip
"""By a step, on an object that is there already; or only to print, copy and store it."""
_MOST: Final = 256
"""A longer container is data, and no table of functions."""


def reach(
    function: Callable[..., Any], state: object, arguments: object
) -> tuple[list[object], list[Holder], frozenset[str]]:
    """What a function can reach: (modules and optimizers, by name or in ``state``; all that it can
    name; all names in its code, and in that of the functions it names).

    Args:
        arguments: of the call; functions among them are called, too.

    Raises:
        InvalidOption: ``state`` holds something else.
    """
    found: list[object] = []
    for leaf in pytree.tree_leaves(state):
        if not isinstance(leaf, _ROOTS):
            raise InvalidOption(
                f"state= takes modules, optimizers and containers of them, and {leaf!r:.60} is "
                "none; hand tensors over as arguments"
            )
        found.append(leaf)
    reached = _Reach()
    reached.follow(function)
    for called in _functions_in(arguments, reached.mentioned):
        reached.follow(called)
    met: set[int] = set()
    while True:
        reached.follow_escaped()
        roots = [*found, *reached.roots(), *_roots_in(arguments)]
        new = [root for root in roots if id(root) not in met]
        if not new:
            return [*found, *reached.roots()], list(reached.holders.values()), reached.names
        met.update(map(id, new))
        for root in new:
            reached.follow_parts(root)


def unbound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What a partial function holds is an argument like the others."""
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs


def _roots_in(content: object) -> list[object]:
    return [leaf for leaf in leaves_of(content) if isinstance(leaf, _ROOTS)]


class _Reach:
    def __init__(self) -> None:
        self.holders: dict[tuple[int, str], Holder] = {}
        self.mentioned: set[str] = set()
        self._seen: set[tuple[int, int]] = set()
        self._escaped: dict[int, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.mentioned)

    def roots(self) -> list[object]:
        """Modules and optimizers that have a name."""
        return [root for holder in self.holders.values() for root in _roots_in(holder.content)]

    def follow(self, function: Any) -> None:
        """Note what the function can name, and go on with what it can call."""
        if isinstance(function, partial):
            content = [function.func, function.args, function.keywords]
            self._note(Holder("partial", (id(function), ""), content, lambda: content, _keep), ())
            function = function.func
        if not isinstance(function, FunctionType | MethodType):
            function = _call_of(function)
        inner: Any = getattr(function, "__func__", function)
        bound = getattr(function, "__self__", None)
        asked = id(inner), id(bound)
        if asked in self._seen or not isinstance(inner, FunctionType):
            return
        self._seen.add(asked)
        names = code_names(inner.__code__)
        self.mentioned |= names
        own = None if bound is None else names_of_first(inner.__code__)
        if bound is not None and own is None and not isinstance(bound, _ROOTS):
            self._escaped[id(bound)] = bound
        for holder in (*_of_self(bound, names if own is None else own), *_of_code(inner)):
            self._note(holder, names)
        if bound is None or isinstance(bound, _ROOTS):
            return
        for method in _methods(bound, names):
            self.follow(method)
        if "getattr" in names:  # of a name that is put together
            for item in functions_of(bound if isinstance(bound, type) else type(bound)):
                self.follow(MethodType(item, bound))

    def follow_escaped(self) -> None:
        """Objects that methods hand on: others may ask them for whatever is mentioned anywhere."""
        before = None
        while before != (len(self.holders), len(self.mentioned)):
            before = len(self.holders), len(self.mentioned)
            for bound in list(self._escaped.values()):
                names = self.names
                for holder in _of_self(bound, names):
                    self._note(holder, names)
                for method in _methods(bound, names):
                    self.follow(method)

    def _note(self, holder: Holder, names: Iterable[str]) -> None:
        if holder.place not in self.holders:
            self.holders[holder.place] = holder
            for called in _functions_in(holder.content, names):
                self.follow(called)

    def follow_parts(self, root: object) -> None:
        """The code of a module's parts, and their hooks; torch's own and libraries' is theirs."""
        if not isinstance(root, nn.Module):
            for method in functions_of(type(root)):
                self.follow(method)
            for name, held in vars(root).items():
                if name.endswith("_hooks") and isinstance(held, dict):
                    for hook in list(held.values()):
                        self.follow(hook)
            return
        for part in root.modules():
            for method in functions_of(type(part)):
                self.follow(method)
            own = vars(part)
            if "forward" in own:
                self.follow(own["forward"])
            for name in _HOOKS:
                for hook in list((own.get(name) or {}).values()):
                    self.follow(hook)


def functions_of(kind: type) -> Iterator[FunctionType]:
    """The methods and properties of a class, as far as it and its bases are the caller's."""
    for base in kind.__mro__:
        if base is object or _is_foreign(base):
            continue
        for item in vars(base).values():
            item = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
            if isinstance(item, FunctionType):
                yield item


def implicit(kind: type) -> frozenset[str]:
    """The methods of the caller's that run without being named: by operators, ``next``, ``len``."""
    found = _IMPLICIT.get(kind)
    if found is None:
        named = (
            name
            for base in kind.__mro__
            if base is not object and not _is_foreign(base)
            for name, item in vars(base).items()
            if name.startswith("__") and isinstance(item, FunctionType)
        )
        found = _IMPLICIT[kind] = frozenset(named) - _NOT_RUN
    return found


def _is_foreign(kind: type) -> bool:
    """Whether a class comes with a package; what its code names is the package's."""
    known = _FOREIGN.get(kind)
    if known is None:
        top = kind.__module__.partition(".")[0]
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        known = _FOREIGN[kind] = is_package(top) or "site-packages" in file
    return known


def _functions_in(content: object, names: Iterable[str]) -> Iterator[Any]:
    """What can be called in a content: functions, objects that are callable, of the caller's."""
    if isinstance(content, list | tuple | dict | set) and len(content) > _MOST:
        return
    for leaf in leaves_of(content):
        if isinstance(leaf, (*_ROOTS, *PLAIN, torch.Tensor)):
            continue
        if isinstance(leaf, ModuleType):
            if not is_package(leaf.__name__):
                held = vars(leaf)
                yield from (held[n] for n in names if isinstance(held.get(n), FunctionType))
        elif isinstance(leaf, FunctionType | MethodType):
            if not is_package(str(leaf.__module__)):
                yield leaf
        elif isinstance(leaf, partial) or _call_of(leaf) is not None:
            yield leaf
        elif isinstance(leaf, type):
            yield from functions_of(leaf)
        elif not _is_foreign(type(leaf)):
            yield from _methods(leaf, frozenset(names))


def is_package(module: str) -> bool:
    """Whether a Python module is torch's, NumPy's, remat's or Python's own."""
    top = module.partition(".")[0]
    own = top in sys.stdlib_module_names and top != "__main__"
    return own or top in ("torch", "numpy", "remat")


def _call_of(item: object) -> FunctionType | MethodType | None:
    """The function that runs when an object of the caller's is called."""
    if isinstance(item, type | nn.Module):
        return None
    wrapped = inspect.getattr_static(item, "__wrapped__", None)
    if isinstance(wrapped, FunctionType | MethodType):
        return wrapped
    method = getattr(type(item), "__call__", None)  # noqa: B004
    if not isinstance(method, FunctionType) or is_package(str(method.__module__)):
        return None
    return MethodType(method, item)


def _methods(bound: object, names: frozenset[str]) -> Iterator[Any]:
    """Implicit methods, and those of these names, of an object or a class; overridden ones, too."""
    kind = bound if isinstance(bound, type) else type(bound)
    names |= implicit(kind)
    for base in kind.__mro__:
        for name in names & vars(base).keys():
            method = vars(base)[name]
            method = method.fget if isinstance(method, property) else method
            method = getattr(method, "__func__", method)
            if isinstance(method, FunctionType):
                yield MethodType(method, bound)


def _of_self(bound: object, names: frozenset[str]) -> Iterator[Holder]:
    if bound is None:
        return
    if isinstance(bound, _ROOTS):
        yield Holder("self", (id(bound), ""), bound, lambda: bound, _keep)
        return
    kind = bound if isinstance(bound, type) else type(bound)
    own: dict[str, Any] = {} if kind is bound else getattr(bound, "__dict__", {})
    yield from (Holder.in_dict(own, name) for name in names & own.keys())
    for name in sorted(names - own.keys()):
        known = inspect.getattr_static(kind, name, None)
        if isinstance(known, MemberDescriptorType):  # a slot; properties are not run
            try:
                content = known.__get__(bound)
            except AttributeError:
                continue
            get, put = partial(getattr, bound, name), partial(setattr, bound, name)
            yield Holder(name, (id(bound), name), content, get, put)
        elif known is not None and not callable(known) and not hasattr(type(known), "__get__"):
            get = partial(inspect.getattr_static, kind, name)
            yield Holder(name, (id(kind), name), known, get, _keep)


def _keep(_: Any) -> None:
    """Numbers of a class, and defaults, stay what they are."""


def _of_code(inner: FunctionType) -> Iterator[Holder]:
    code, known = inner.__code__, inner.__globals__
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # it is not filled yet
            continue
        get, put = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
        yield Holder(name, (id(cell), ""), content, get, put)
    for name in global_names(code):
        if name in known:
            yield Holder.in_dict(known, name)
    yield from _defaults(inner, code)


def _defaults(inner: FunctionType, code: CodeType) -> Iterator[Holder]:
    """What stands for arguments that a call leaves out."""
    values = inner.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    named: dict[str, Any] = dict(zip(last, values, strict=True)) | (inner.__kwdefaults__ or {})
    for name, content in named.items():
        yield Holder(name, (id(inner), name), content, partial(named.get, name), _keep)
