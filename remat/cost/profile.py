"""What an op allocates inside, and how long it takes: found by running it on made-up data.

An op is run alone, on tensors of the same shapes, strides and dtypes. Floats are 0.5, which every
function of a training step accepts; integers are 0, a valid index everywhere; bools are False.
Workspaces depend on layouts (convolutions copy one into another), so strides are part of the
signature under which a figure is remembered. An op that cannot be run so is reported, not guessed.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from remat.budget import machine_memory
from remat.cost.flops import WrappedCall, wrapped_call
from remat.cost.isolation import outside_modes
from remat.cost.store import Store, environment
from remat.passes.allocations import Allocations
from remat.passes.ops import KNOWN_NAMESPACES

_FLOAT_FILL: Final = 0.5
_TIMED_RUNS: Final = 5
_TIMED_SECONDS: Final = 0.05
_WATCHED_RUNS: Final = 2
# One more look at an op that takes longer than this tells nothing worth the time.
_LONG_SECONDS: Final = 0.5
# Reads pointers and offsets out of what its forward left in a tensor of bytes: zeros crash it.
_OPAQUE: Final = ("aten::mkldnn_rnn_layer_backward",)
# What an op on made-up data may answer with. Nothing else is caught.
_REFUSALS: Final = (
    RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError,
    AttributeError, LookupError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op signature, measured.

    Attributes:
        workspace: bytes beyond its outputs when it had most allocated; outputs count as the graph
            says, so that outputs + workspace is the op's true peak.
        retained: bytes that its outputs keep allocated beyond what the graph says. A reduced loss
            is a number in the storage of all the terms it was summed from.
        seconds: least wall time of some runs; None if it was not timed.
        strides: of every output tensor, if any of them is laid out otherwise than the graph says.
        failure: why it could not be run; the other figures mean nothing then.
    """

    workspace: int = 0
    retained: int = 0
    seconds: float | None = None
    strides: tuple[tuple[int, ...], ...] | None = None
    failure: str | None = None


class _Run(NamedTuple):
    """One watched run: peak, bytes its result holds, shapes and strides of its result."""

    seconds: float
    peak: int
    held: int
    layout: list[tuple[tuple[int, ...], tuple[int, ...]]]


class Profiler:
    """Op profiles of one device, remembered in memory and on disk.

    Args:
        device: where ops are run, "cpu" or "cuda".
        granularity: the allocator hands out multiples of this many bytes.
    """

    def __init__(self, device: torch.device, granularity: int = 1) -> None:
        self.device = device
        self.granularity = granularity
        self._store = Store("ops", environment(device))
        self._failures: dict[str, OpProfile] = {}

    def profiles(
        self, nodes: Sequence[fx.Node], *, timed: bool, run: bool = True
    ) -> dict[fx.Node, OpProfile | None]:
        """The profile of each node, all of one graph; None where ``run`` is false and nothing is
        remembered.

        Runs every signature not met before: it may be called while a graph is traced, keeps the
        random generators as they are, and holds the tensors of one op at a time.
        """
        found = outside_modes(lambda: self._walk(nodes, timed, run), self.device)
        self._store.save()
        return found

    def _walk(
        self, nodes: Sequence[fx.Node], timed: bool, run: bool
    ) -> dict[fx.Node, OpProfile | None]:
        """Profiles in program order, with the layouts that tensors really have.

        Fake tensors err: they say that ``mse_loss_backward`` keeps the layout of its input, and on
        the CPU it does not. What reads its output copies it, or not, as the true layout demands.
        """
        found: dict[fx.Node, OpProfile | None] = dict.fromkeys(nodes)
        relaid: dict[fx.Node, Any] = {}
        for node in nodes[0].graph.nodes if nodes else ():
            if node in found:
                call = wrapped_call(node, relaid)
                profile = found[node] = self._profile(call, wrapped_call(node), timed, run)
                if profile is not None and profile.strides is not None:
                    relaid[node] = with_strides(call.result, profile.strides)
            elif node.op == "call_function" and any(n in relaid for n in node.all_input_nodes):
                call = wrapped_call(node, relaid)
                if why_not_run(call) is None or call.target is operator.getitem:
                    relaid[node] = call.target(*call.args, **call.kwargs)
        return found

    def _profile(
        self, call: WrappedCall, in_graph: WrappedCall, timed: bool, run: bool
    ) -> OpProfile | None:
        name = signature(call)
        if name in self._failures:
            return self._failures[name]
        if name in self._store:
            workspace, retained, seconds, strides = self._store[name]
            if seconds is not None or not timed:
                known = strides and tuple(map(tuple, strides))
                return OpProfile(workspace, retained, seconds, known)
        if not run:
            return None
        found = self._measure(call, in_graph, timed)
        if found.failure is None:
            figures = (found.workspace, found.retained, found.seconds, found.strides)
            self._store.put(name, figures)
        else:
            # Not on disk: another process may have the memory, or the extension, it lacked.
            self._failures[name] = found
        return found

    def _measure(self, call: WrappedCall, in_graph: WrappedCall, timed: bool) -> OpProfile:
        expected = output_bytes(in_graph, self.granularity)
        failure = why_not_run(call) or self._lacks_memory(call, expected)
        if failure is not None:
            return OpProfile(failure=failure)
        try:
            args, kwargs = made_up(call)
            with _generators_kept((args, kwargs)):
                return self._run(call, args, kwargs, expected, timed)
        except _REFUSALS as error:
            first_line = (str(error).splitlines() or [""])[0]
            return OpProfile(failure=f"{type(error).__name__}: {first_line}")

    def _run(
        self,
        call: WrappedCall,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        expected: int,
        timed: bool,
    ) -> OpProfile:
        # The first run makes what libraries then keep: handles, compiled kernels, plans.
        first = self._watch(call, args, kwargs)
        long = first.seconds > _LONG_SECONDS
        watched = [self._watch(call, args, kwargs) for _ in range(1 if long else _WATCHED_RUNS)]
        workspace = max(0, max(run.peak for run in watched) - expected)
        retained = max(0, max(run.held for run in watched) - expected)
        seconds = self._least_seconds(call, args, kwargs) if timed else None
        return OpProfile(workspace, retained, seconds, _true_strides(call.result, first.layout))

    def _watch(self, call: WrappedCall, args: Sequence[Any], kwargs: dict[str, Any]) -> _Run:
        with Allocations(self.device) as watch:
            result = call.target(*args, **kwargs)
            held = fresh_bytes(result, (args, kwargs), self.granularity)
            layout = [_sizes(tensor) for tensor in tensors_of(result)]
            # Inside the watch, or the allocator would remember blocks it never saw released.
            del result
        return _Run(watch.seconds, watch.peak, held, layout)

    def _least_seconds(
        self, call: WrappedCall, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> float:
        """Of a few runs, fewer where they take long."""
        least = spent = self._time(call, args, kwargs)
        for _ in range(_TIMED_RUNS - 1):
            if spent > _TIMED_SECONDS:
                break
            seconds = self._time(call, args, kwargs)
            least, spent = min(least, seconds), spent + seconds
        return least

    def _time(self, call: WrappedCall, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
        self._wait()
        start = time.perf_counter()
        result = call.target(*args, **kwargs)
        self._wait()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _lacks_memory(self, call: WrappedCall, output: int) -> str | None:
        inputs = tensors_of((call.args, call.kwargs))
        needed = output + sum(_extent_bytes(tensor) for tensor in inputs)
        _, free = machine_memory(str(self.device))
        if needed <= free:
            return None
        return f"its inputs and outputs take {needed} bytes and {free} are free"


@contextlib.contextmanager
def _generators_kept(given: Any) -> Iterator[None]:
    """Generators that an op is given by name are the caller's own, not made up."""
    leaves = pytree.tree_leaves(given)
    states = [(g, g.get_state()) for g in leaves if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def signature(call: WrappedCall) -> str:
    """All that a figure of this call depends on, as text: the op, and for each tensor its dtype,
    shape, strides and device; a tensor that comes again is marked as the same."""
    seen: dict[int, int] = {}

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            again = seen.setdefault(id(value), len(seen))
            device = "" if value.device.type == "cpu" else f"@{value.device.type}"
            dtype = str(value.dtype).removeprefix("torch.")
            shape, strides = _sizes(value)
            return f"{dtype}{list(shape)}/{list(strides)}{device}#{again}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(describe, value))}]"
        return repr(_concrete(value))

    arguments = [describe(value) for value in call.args]
    arguments += [f"{name}={describe(value)}" for name, value in sorted(call.kwargs.items())]
    return f"{call.target}({', '.join(arguments)})"


def why_not_run(call: WrappedCall) -> str | None:
    """Why the op must not be run on made-up data, or None if it may be."""
    if not isinstance(call.target, torch._ops.OpOverload):
        return "it is no operator of torch"
    if call.target.namespace not in KNOWN_NAMESPACES:
        return f"{call.target} is an operator remat does not know, and may do more than compute"
    if call.target._schema.name in _OPAQUE:
        return "an input is a workspace that only the library can make"
    for tensor in tensors_of((call.args, call.kwargs)):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return f"an input is {tensor.layout} or quantized"
        if tensor.is_conj() or tensor.is_neg():
            return "an input is conjugated or negated lazily"
        if tensor.device.type == "meta":
            return "an input has no device"
    return None


def made_up(call: WrappedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Real arguments in place of the fake ones; the same tensor where the same comes again."""
    made: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _concrete(value)
        if id(value) not in made:
            made[id(value)] = _tensor_like(value)
        return made[id(value)]

    args, kwargs = pytree.tree_map(real, (call.args, call.kwargs))
    return args, kwargs


def output_bytes(call: WrappedCall, granularity: int = 1) -> int:
    """Bytes of the storages the op allocates for its result, as the graph says."""
    return fresh_bytes(call.result, (call.args, call.kwargs), granularity)


def fresh_bytes(result: Any, arguments: Any, granularity: int = 1) -> int:
    """Bytes of the storages of ``result`` that none of ``arguments`` lies in."""
    known = {_storage_key(tensor) for tensor in tensors_of(arguments)}
    fresh = {
        _storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(result)
        if _storage_key(tensor) not in known
    }
    return sum(-(-int(size) // granularity) * granularity for size in fresh.values())


def with_strides(value: Any, strides: Sequence[Sequence[int]]) -> Any:
    """The fake tensors of ``value`` in other layouts."""
    wanted = iter(strides)

    def relay(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.new_empty_strided(tuple(leaf.shape), tuple(next(wanted)))

    return pytree.tree_map(relay, value)


def _true_strides(
    claimed: Any, layout: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[tuple[int, ...], ...] | None:
    """The strides of ``layout``, if they are others than those of the tensors in ``claimed``."""
    told = [_sizes(tensor) for tensor in tensors_of(claimed)]
    if [shape for shape, _ in told] != [shape for shape, _ in layout]:
        return None
    if all(map(_same_layout, told, layout)):
        return None
    return tuple(strides for _, strides in layout)


def _same_layout(
    one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    """Strides agree wherever there is more than one element to step to."""
    sizes, strides = one
    if 0 in sizes:
        return True
    return all(size == 1 or a == b for size, a, b in zip(sizes, strides, other[1], strict=True))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of containers."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _tensor_like(fake: torch.Tensor) -> torch.Tensor:
    shape, strides = _sizes(fake)
    flat = torch.empty(_extent(shape, strides), dtype=fake.dtype, device=fake.device)
    flat.fill_(_FLOAT_FILL if fake.dtype.is_floating_point or fake.dtype.is_complex else 0)
    return flat.as_strided(shape, strides)


def _extent_bytes(tensor: torch.Tensor) -> int:
    return _extent(*_sizes(tensor)) * tensor.element_size()


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last: expanded dimensions take none."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(_concrete, tensor.shape)), tuple(map(_concrete, tensor.stride()))


def _concrete(value: Any) -> Any:
    """A symbolic number by its hint."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
