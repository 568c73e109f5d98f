"""Where a step finds its tensors: modules, optimizers, arguments; swapped for others and back.

A *slot* is one place that holds a tensor: a parameter or buffer of a module, its gradient, an entry
of an optimizer's state, an argument. While a step is traced, the slots hold fake tensors; when it
has run, those that the step bound anew are bound to what the graph returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.passes.torch_private.autograd import has_hooks
from remat.solvers.errors import CaptureError
from remat.step_contents import names_in_methods
from remat.step_names import Holder, tensors_in
from remat.step_reach import reach

HELD: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_ROOTS: Final = (nn.Module, torch.optim.Optimizer)
_REDUCING: Final = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass
class Places:
    """The modules, optimizers and tensors of one call, and the inputs they make.

    Attributes:
        modules, optimizers: what was found, outermost first.
        holders: all that the function finds by name.
        arguments: (args, kwargs) of the call.
        names: all that the code of the step mentions.
        lifts_rates: learning rates that are numbers are inputs, not part of the graph.
        inputs: every tensor once, in the order it was met.
        parts: every module in ``modules``, once, in the order it was met.
    """

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor]
    holders: list[Holder]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    names: frozenset[str]
    lifts_rates: bool = True
    inputs: list[torch.Tensor] = field(default_factory=list)
    parts: list[nn.Module] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    @cached_property
    def paths(self) -> dict[nn.Module, str]:
        """Of every module, for people."""
        found: dict[nn.Module, str] = {}
        several = len(self.modules) > 1
        for number, module in enumerate(self.modules):
            for path, part in module.named_modules():
                head = f"{type(module).__name__.lower()}{number or ''}"
                full = ".".join(filter(None, (head, path))) if several else path
                found.setdefault(part, full)
        return found

    @cached_property
    def names_of_modules(self) -> frozenset[str]:
        """What the methods of the modules mention."""
        kinds = dict.fromkeys(type(part) for part in self.parts)
        return self.names.union(*(names_in_methods(kind) for kind in kinds))

    @staticmethod
    def of(
        function: Callable[..., Any],
        state: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        lifts_rates: bool = True,
    ) -> Places:
        """Look through what a function can name, ``state``, and the arguments of a call.

        Raises:
            InvalidOption: ``state`` holds what is neither module nor optimizer.
            CaptureError: an argument has a history, hooks hang on a tensor, or a module exchanges
                gradients.
        """
        roots, holders, names = reach(function, state, (args, kwargs))
        found = Places([], [], [], holders, (args, kwargs), names, lifts_rates)
        named = (tensor for holder in holders for tensor in holder.tensors)
        for root in (*roots, *pytree.tree_leaves((args, kwargs)), *named):
            found._look(root)
        found.parts = list(dict.fromkeys(p for module in found.modules for p in module.modules()))
        for tensor in found._all_tensors():
            found._add(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                found._add(tensor.grad)
        found._refuse_history()
        found._refuse_hooks()
        return found

    def _refuse_history(self) -> None:
        for tensor in tensors_in(self.arguments):
            if not tensor.is_leaf:
                raise CaptureError(
                    f"an argument of shape {tuple(tensor.shape)} was computed outside the step, "
                    "with its autograd history, and gradients would end there: compute it in the "
                    "step, or detach it"
                )

    def _refuse_hooks(self) -> None:
        """They hang on the real tensors, and the graph is that of others."""
        for tensor in self.inputs:
            if has_hooks(tensor):
                raise CaptureError(
                    f"a tensor of shape {tuple(tensor.shape)} has hooks (register_hook, "
                    "register_post_accumulate_grad_hook), which one graph cannot call: do what "
                    "they do inside the step, or use remat.compile"
                )
        for kind in {type(part) for part in self.parts}:
            if any(base.__name__ in _REDUCING for base in kind.__mro__):
                raise CaptureError(
                    f"{kind.__name__} exchanges gradients in hooks, which one graph cannot call: "
                    "use remat.compile on the module inside it"
                )

    def _look(self, root: object) -> None:
        kinds: dict[type, list[Any]] = {
            nn.Module: self.modules, torch.optim.Optimizer: self.optimizers,
            torch.Tensor: self.tensors,
        }  # fmt: skip
        for kind, known in kinds.items():
            if isinstance(root, kind) and not any(item is root for item in known):
                known.append(root)

    def _all_tensors(self) -> Iterator[torch.Tensor]:
        for part in self.parts:
            for held in (part._parameters, part._buffers):
                yield from (tensor for tensor in held.values() if tensor is not None)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
                yield from (value for value in group.values() if isinstance(value, torch.Tensor))
            for parameter, state in optimizer.state.items():
                if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
                    raise CaptureError(
                        f"{type(optimizer).__name__} keeps state of its own, {parameter!r:.40}, "
                        "beside that of parameters, which a graph cannot write: keep it in "
                        "state[parameter], in tensors"
                    )
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        yield from self.tensors

    def _add(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.inputs)
            self.inputs.append(tensor)

    def index(self, tensor: object) -> int | None:
        """Which input the tensor is, or None."""
        return self._index.get(id(tensor))

    def rates(self) -> list[tuple[dict[str, Any], float]]:
        """The groups whose learning rate is a number: it is read anew in every call."""
        return [
            (group, group["lr"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if self.lifts(group)
        ]

    def lifts(self, group: dict[str, Any]) -> bool:
        """Whether the learning rate of a group is an input."""
        return self.lifts_rates and isinstance(group.get("lr"), float)

    def passed(self) -> frozenset[int]:
        """Inputs that come by the arguments of the call, and are no parameters."""
        leaves = pytree.tree_leaves(self.arguments)
        found = (
            self.index(x) for x in leaves if isinstance(x, torch.Tensor) and not x.requires_grad
        )
        return frozenset(index for index in found if index is not None)
