"""What a step does beside its tensors while it is traced, which its graph will never do again.

A graph replays ops on tensors. A counter that the step moves, a scheduler it steps, a list it
appends to, a seed it sets: all that happens once, when the step is traced. Here it is noticed. Only
switches (``train()``, ``eval()``, ``requires_grad_()``) are done again behind every run.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.solvers.errors import CaptureError
from remat.step_names import PLAIN

if TYPE_CHECKING:
    from remat.step_places import Places

_SYMBOLIC: Final = (torch.SymFloat, torch.SymInt, torch.SymBool)
_OPAQUE: Final = (nn.Module, torch.optim.Optimizer, torch.Tensor, type, ModuleType)
_SEEDS: Final = ("manual_seed", "seed")
_STATES: Final = ("set_rng_state",)


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
    def around_call(self, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the step's function, its tensors swapped for ``others``, those of the trace.

        Raises:
            CaptureError: it changed what will not stay changed, or left a number of the trace.
        """
        before = self._numbers()
        training = [part.training for part in self._places.parts]
        yield
        self.flags = self._switched(training, others)
        after = self._numbers()
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name, ()), after.get(name, ())
            if old == new:
                continue
            if any(isinstance(item, _SYMBOLIC) for item in new):
                raise CaptureError(
                    f"the step leaves a number that was read out of a tensor in {name}, which is "
                    "unknown while the step is traced, and would never change again: return the "
                    "tensor, and collect it outside"
                )
            if name in self._swapped:
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
                if tensor.is_leaf and other.requires_grad != tensor.requires_grad
            },
        )

    @property
    def _swapped(self) -> set[str]:
        """Containers that hold tensors: a copy of them stands there during the trace."""
        return {holder.name for holder in self._places.holders if holder.tensors}

    def _numbers(self) -> dict[str, tuple[Any, ...]]:
        """By the name of what holds them."""
        found: dict[str, tuple[Any, ...]] = {}
        for holder in self._places.holders:
            leaves = pytree.tree_leaves(holder.get())
            found[holder.name] = tuple(x for leaf in leaves for x in _numbers_of(leaf))
        for part in self._places.parts:
            path = self._places.paths.get(part) or type(part).__name__
            for name, value in vars(part).items():
                if name != "training" and isinstance(value, (*PLAIN, *_SYMBOLIC)):
                    found[f"{path}.{name}"] = (_typed(value),)
        for optimizer in self._places.optimizers:
            for group in optimizer.param_groups:
                for name, value in group.items():
                    if name != "lr" and isinstance(value, (*PLAIN, *_SYMBOLIC)):
                        key = f"{name!r} of {type(optimizer).__name__}"
                        found[key] = (*found.get(key, ()), _typed(value))
        return found

    def _generators(self) -> list[bytes]:
        named = (x for h in self._places.holders for x in pytree.tree_leaves(h.content))
        found = [g for g in named if isinstance(g, torch.Generator)]
        return [g.get_state().numpy().tobytes() for g in found]

    @contextlib.contextmanager
    def _setters_noted(self) -> Iterator[None]:
        places = [torch, torch.random, torch.cuda, torch.cuda.random]
        before = [
            (place, name, getattr(place, name))
            for place in places
            for name in (*_SEEDS, *_STATES, "manual_seed_all")
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


def _drawn() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=True)
    return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])


def _numbers_of(leaf: Any) -> list[Any]:
    """A number itself; those in the attributes of an object of the caller's."""
    if isinstance(leaf, (*PLAIN, *_SYMBOLIC)):
        return [_typed(leaf)]
    if isinstance(leaf, _OPAQUE) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return []
    return [_typed(x) for x in vars(leaf).values() if isinstance(x, (*PLAIN, *_SYMBOLIC))]


def _typed(value: Any) -> Any:
    """Numbers that compare equal may be different things; numbers of the trace are themselves."""
    return value if isinstance(value, _SYMBOLIC) else (type(value).__name__, repr(value))
