"""What a step does beside its tensors while it is traced, which its graph will never do again.

A graph replays ops on tensors. A counter that the step moves, a scheduler it steps, a list it
appends to, a seed it sets: all that happens once, when the step is traced. Here it is noticed. Only
switches (``train()``, ``eval()``, ``requires_grad_()``) are done again behind every run.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree

from remat.solvers.errors import CaptureError
from remat.step_contents import A_TENSOR, KEYED, SYMBOLIC, UNKNOWN, Found, contents
from remat.step_names import PLAIN, leaves_of, tensors_in
from remat.step_places import HELD

if TYPE_CHECKING:
    from remat.step_places import Places

_Numbers = dict[Any, tuple[str, tuple[Found, ...]]]
_NOTHING: Final[tuple[str, tuple[Found, ...]]] = "", ()
_SEEDS: Final = ("manual_seed", "seed")
_STATES: Final = ("set_rng_state",)
_BY_NAME: Final = (
    "default_generator",
    "set_rng_state",
)  # no function of torch's is called by these


@dataclass(frozen=True)
class Flags:
    """What a step switches, and every run of its graph switches again.

    Attributes:
        training: number of a module in ``Places.parts`` → its ``training`` behind the step.
        trained: number of an input → whether it requires a gradient behind the step.
    """

    training: dict[int, bool]
    trained: dict[int, bool]

    def switch(self, places: Places) -> None:
        """Behind a run."""
        for number, training in self.training.items():
            places.parts[number].training = training
        for number, trained in self.trained.items():
            places.inputs[number].requires_grad_(trained)


class SideEffects:
    """Of one trace.

    Attributes:
        changed: what it changed in Python, for people; empty if nothing.
        flags: what it switched.
    """

    def __init__(self, places: Places) -> None:
        self.changed = ""
        self.flags = Flags({}, {})
        self._places = places
        self._thread = threading.get_ident()
        self._seeded = False
        self._restored = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around the trace: who sets a generator, and what Python's own generators drew.

        Raises:
            CaptureError: a generator was seeded.
        """
        before = self._generators()
        drawn = _drawn()
        with self._setters_noted():
            yield
        if self._seeded or self._generators() != before:
            raise CaptureError(
                "the step seeds a random generator (manual_seed, set_state), which happens once, "
                "when it is traced, and never again: seed outside the step"
            )
        if _drawn() != drawn:
            self.changed = "the state of Python's or NumPy's random generator"

    def refuse_replayed_draws(self, draws: bool) -> None:
        """Refuse a step that draws, and sets the state of a generator back.

        Raises:
            CaptureError: it does both, as a checkpoint over dropout does.
        """
        if draws and self._restored:
            raise CaptureError(
                "the step draws random numbers, and sets the state of a generator back (fork_rng, "
                "or torch.utils.checkpoint over dropout), which a graph cannot repeat: leave the "
                "checkpoint out, remat recomputes by itself; or give it preserve_rng_state=False "
                "if nothing in it is random"
            )

    @contextlib.contextmanager
    def around_call(self, others: Sequence[torch.Tensor], arguments: Any) -> Iterator[None]:
        """Around the step's function, its tensors swapped for ``others``, those of the trace.

        Args:
            arguments: what it is given, a copy of the caller's containers.

        Raises:
            CaptureError: it changed what will not stay changed, or left a number of the trace.
        """
        # An input and what stands for it are one.
        inputs = self._places.inputs
        known = {id(x): n for tensors in (inputs, others) for n, x in enumerate(tensors)}
        before = self._numbers(arguments, known)
        training = [part.training for part in self._places.parts]
        given = pytree.tree_flatten(arguments)
        modes = torch.is_grad_enabled(), torch.get_default_dtype()
        with self._caches_cleared():
            yield
        self.flags = self._switched(training, others)
        if not _is_same(pytree.tree_flatten(arguments), given):
            raise CaptureError(
                "the step changes a container that it is given, which its graph would not do "
                "again: return what it puts there"
            )
        left = torch.is_grad_enabled(), torch.get_default_dtype()
        torch.set_default_dtype(modes[1])
        if left != modes:
            raise CaptureError(
                "the step leaves gradients switched on or off, or another default dtype, which its "
                "graph would not do again: use `with torch.no_grad():`, or switch outside"
            )
        self._compare(before, self._numbers(arguments, known))

    @contextlib.contextmanager
    def _caches_cleared(self) -> Iterator[None]:
        """A cached function (``lru_cache``) must not hand out tensors of the trace later."""
        named = [leaf for holder in self._places.holders for leaf in leaves_of(holder.content)]
        caches = [leaf for leaf in named if isinstance(leaf, functools._lru_cache_wrapper)]
        before = [cache.cache_info().misses for cache in caches]
        try:
            yield
        finally:
            for cache, misses in zip(caches, before, strict=True):
                if cache.cache_info().misses != misses:
                    cache.cache_clear()

    def _compare(self, before: _Numbers, after: _Numbers) -> None:
        swapped = {holder.place for holder in self._places.holders if holder.tensors}
        for key in dict.fromkeys((*before, *after)):
            (name, old), (_, new) = before.get(key, _NOTHING), after.get(key, _NOTHING)
            name = name or after[key][0]
            if old == new:
                continue
            if any(isinstance(value, SYMBOLIC) for _, value in new):
                raise CaptureError(
                    f"the step leaves a number that was read out of a tensor in {name}, which is "
                    "unknown while the step is traced, and would never change again: return the "
                    "tensor, and collect it outside"
                )
            if any(_is_tensor(what) for _, what in {*new} - {*old}):
                raise CaptureError(
                    f"the step leaves another tensor in {name} than was there, which a graph "
                    "cannot do: return it, and put it there outside"
                )
            if key in swapped:
                raise CaptureError(
                    f"the step changes a number in {name}, beside tensors, which its graph would "
                    "not do again: count outside the step, or in a tensor"
                )
            self.changed = name

    def _switched(self, training: list[bool], others: Sequence[torch.Tensor]) -> Flags:
        pairs = enumerate(zip(self._places.inputs, others, strict=True))
        return Flags(
            {
                number: part.training
                for number, part in enumerate(self._places.parts)
                if part.training != training[number]
            },
            {
                number: other.requires_grad
                for number, (tensor, other) in pairs
                if tensor.is_leaf and other.is_leaf and other.requires_grad != tensor.requires_grad
            },
        )

    def _numbers(self, arguments: Any, known: Mapping[int, int]) -> _Numbers:
        """What holds them → (its name, all of them); tensors in ``known`` by their number."""
        places = self._places
        found: _Numbers = {}
        ids = {repr(id(tensor)) for tensor in places.inputs}

        def note(key: Any, name: str, item: object, names: frozenset[str]) -> None:
            walked = contents(item, names, moving=True)
            for path, what in walked:
                _refuse_untold(name + path, what, ids)
            found[key] = name, tuple((path, _numbered(what, known)) for path, what in walked)

        for holder in places.holders:
            note(holder.place, holder.name, holder.get(), places.names)
        note("arguments", "what it is given", arguments, places.names)
        for part in places.parts:
            path = places.paths.get(part) or type(part).__name__
            for name, value in vars(part).items():
                if name != "training" and name not in HELD:
                    note((path, name), f"{path}.{name}", value, places.names_of_modules)
        for number, optimizer in enumerate(places.optimizers):
            kind = type(optimizer).__name__
            for name, value in vars(optimizer).items():
                if not name.startswith("_") and name not in ("param_groups", "state"):
                    note((number, name), f"{name} of {kind}", value, places.names)
            for index, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    lifted = name == "lr" and isinstance(value, (float, *SYMBOLIC))
                    if name != "params" and not (lifted and places.lifts_rates):
                        note((number, index, name), f"{name!r} of {kind}", value, places.names)
        return found

    def _generators(self) -> list[bytes]:
        held = [holder.content for holder in self._places.holders]
        held += [list(vars(part).values()) for part in self._places.parts]
        named = [leaf for content in (*held, self._places.arguments) for leaf in leaves_of(content)]
        found = [g for g in named if isinstance(g, torch.Generator)]
        if not self._places.names.isdisjoint(_BY_NAME):
            found.append(torch.default_generator)
        return [g.get_state().numpy().tobytes() for g in found]

    @contextlib.contextmanager
    def _setters_noted(self) -> Iterator[None]:
        numpy = sys.modules.get("numpy")
        places: list[Any] = [torch, torch.random, torch.cuda, torch.cuda.random, random]
        places += [] if numpy is None else [numpy.random]
        before = [
            (place, name, getattr(place, name))
            for place in places
            for name in (*_SEEDS, *_STATES, "manual_seed_all", "setstate", "set_state")
            if hasattr(place, name)
        ]
        try:
            for place, name, setter in before:
                setattr(place, name, self._noting(name, setter))
            yield
        finally:
            for place, name, setter in before:
                setattr(place, name, setter)

    def _noting(self, name: str, setter: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return setter(*args, **kwargs)
            if name in _STATES:
                self._restored = True
            else:
                self._seeded = True
            return setter(*args, **kwargs)

        return noting


@contextlib.contextmanager
def numbers_restored(places: Places, *, only_if_it_fails: bool = False) -> Iterator[None]:
    """What a trace counts, switches and collects, as it was."""
    holders: list[Any] = [group for o in places.optimizers for group in o.param_groups]
    holders += [vars(part) for part in places.parts]
    before = [
        (holder, {name: value for name, value in holder.items() if isinstance(value, PLAIN)})
        for holder in holders
    ]
    contents_before = [
        (h.content, h.content.copy()) for h in places.holders if _is_plain(h.content)
    ]
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or not only_if_it_fails:
            for holder, numbers in before:
                holder.update(numbers)
            for content, items in contents_before:
                content.clear()
                put = content.extend if isinstance(content, list) else content.update
                put(items)


def _is_plain(content: object) -> bool:
    """Whether it is a container as Python has them, and holds no tensors."""
    return type(content) in (list, dict, set) and not tensors_in(content)


def _drawn() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=True)
    return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])


def _refuse_untold(path: str, what: object, ids: Set[str]) -> None:
    """What a trace cannot find, or move on."""
    if _is_of_keys(what, ids):
        raise CaptureError(
            f"the step reaches {path}, which has tensors, or their id(), as keys: while it is "
            "traced others stand for them, which are in no set and no dict. Tell them by names, or "
            "by an attribute (p.no_decay = True)"
        )
    if what == UNKNOWN:
        raise CaptureError(
            f"the step reaches an iterator, {path}, that does not tell its place, and which its "
            "graph would not move on: take its next item outside the step, and hand it over as an "
            "argument"
        )


def _is_of_keys(what: object, ids: Set[str]) -> bool:
    """Whether it tells tensors by themselves, or by a number that is the id of one."""
    if isinstance(what, frozenset):
        return any(_is_of_keys(part, ids) for part in what)
    number = isinstance(what, tuple) and len(what) == 2 and what[0] == "int"
    return what == KEYED or (number and str(what[1]) in ids)  # type: ignore[index]


def _is_tensor(what: object) -> bool:
    return isinstance(what, tuple) and what[0] == A_TENSOR


def _numbered(what: Any, known: Mapping[int, int]) -> object:
    return (A_TENSOR, known.get(what[1], what[1])) if _is_tensor(what) else what


def _is_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Whether two flattened trees have the same objects in the same places."""
    return one[1] == other[1] and all(a is b for a, b in zip(one[0], other[0], strict=True))
