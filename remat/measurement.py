"""The true peak of a step: what is resident at entry, and what the call adds at most."""

from __future__ import annotations

import dataclasses
import enum
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from remat.passes.allocations import Allocations
from remat.solvers.errors import InvalidOption
from remat.solvers.units import format_bytes, format_seconds

_NO_TENSORS: Final = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.Size,
)  # fmt: skip
_CUDA_GRANULARITY: Final = 512


@dataclass(frozen=True)
class Measurement:
    """What one call took.

    Attributes:
        peak: bytes in use when most were: ``resident + graph``.
        resident: bytes of the tensors that were declared resident, at entry, shared storages once.
        graph: bytes the call had allocated beyond those at entry when most were.
        reserved: on CUDA, bytes the caching allocator held at most (fragmentation included);
            None on the CPU.
        seconds: wall time of the call, with the watching.
        timeline: on the CPU, (seconds since entry, bytes in use) after each event.
    """

    peak: int
    resident: int
    graph: int
    reserved: int | None
    seconds: float
    timeline: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    def __int__(self) -> int:
        return self.peak

    def __str__(self) -> str:
        reserved = "" if self.reserved is None else f", {format_bytes(self.reserved)} reserved"
        return (
            f"peak {format_bytes(self.peak)} = {format_bytes(self.resident)} resident + "
            f"{format_bytes(self.graph)} in the call{reserved}, {format_seconds(self.seconds)}"
        )


def measure(
    step_function: Callable[[], object],
    resident: object = (),
    *,
    warmup: int = 1,
    device: torch.device | str | None = None,
) -> Measurement:
    """The true peak of one call of ``step_function``, in bytes.

    The function is called ``warmup + 1`` times and every call counts: parameters are updated,
    random numbers drawn, buffers written as often as it is called. Compilation, lazily made
    optimizer state and first gradients belong to the warm-up calls; only the last call is
    watched. Its result is held until the watching ends.

    ``resident`` names what is alive at entry and stays in the sum: modules (parameters, buffers),
    optimizers (state), tensors and any nesting of containers, dataclasses and plain objects of
    them; each tensor brings its ``.grad``. It is looked through after the warm-up, so gradients
    that the last warm-up call left behind are resident: if the measured call frees them, the sum
    falls by them, as memory does. On the CPU this holds for what the last warm-up call allocated;
    the release of anything older is not seen, and the peak then too large (with ``warmup=0``, a
    gradient that an earlier step left behind counts until the end). Memory the warm-up left, that
    the measured call frees, and that is not declared makes the peak too small: declare it.

    Args:
        step_function: one training step, without arguments.
        resident: see above.
        warmup: calls before the measured one, at least 0.
        device: whose memory is measured. None: the device of the tensors of ``resident``, CUDA
            where there are several; the CPU when there are none.

    Raises:
        InvalidOption: ``warmup`` is negative, or ``resident`` holds something in which no tensors
            can be looked for.
        RematError: a torch profiler runs on this thread, or the device is neither cpu nor cuda.
    """
    if warmup < 0:
        raise InvalidOption(f"warmup is {warmup}; the number of calls before must be at least 0")
    watched = _watched_device(device, resident)
    for _ in range(warmup - 1):
        step_function()
    # Under a watch of its own, so that the allocator knows the sizes of what this call leaves
    # behind when the measured one frees it.
    with Allocations(watched):
        if warmup:
            step_function()
        # Garbage in cycles would be freed at a moment that has nothing to do with the step.
        gc.collect()
    before = resident_bytes(resident, watched)
    with Allocations(watched) as watch:
        result = step_function()
    del result
    return Measurement(
        peak=before + watch.peak,
        resident=before,
        graph=watch.peak,
        reserved=watch.reserved,
        seconds=watch.seconds,
        timeline=tuple((seconds, before + level) for seconds, level in watch.timeline),
    )


def resident_bytes(
    resident: object, device: torch.device | str = "cpu", granularity: int | None = None
) -> int:
    """Bytes of all storages on ``device`` found in ``resident``, each storage once.

    Args:
        granularity: each is rounded up to a multiple of this many bytes, as the allocator hands
            them out. None: that of ``device``, 512 on CUDA.

    Raises:
        InvalidOption: something in which no tensors can be looked for.
    """
    wanted = torch.device(device)
    if granularity is None:
        granularity = _CUDA_GRANULARITY if wanted.type == "cuda" else 1
    sizes: dict[int, int] = {}
    for tensor in resident_tensors(resident):
        if not _is_on(tensor, wanted):
            continue
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = -(-storage.nbytes() // granularity) * granularity
    return sum(sizes.values())


def given_tensors(inputs: object) -> Iterator[torch.Tensor]:
    """The dense tensors in the arguments of a call: in containers, mappings and dataclasses. What
    else a caller may give is passed over.
    """
    pending, seen = [inputs], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            if _is_dense(item):
                yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                pending.extend(item.values())
            elif isinstance(item, (list, tuple, Set)):
                pending.extend(item)
            elif dataclasses.is_dataclass(item) and not isinstance(item, type):
                pending.extend(getattr(item, f.name, None) for f in dataclasses.fields(item))


def resident_tensors(resident: object) -> Iterator[torch.Tensor]:
    """Every dense tensor found in ``resident``, gradients and the parts of tensors that are made
    of others (sparse ones, distributed ones) included.

    Raises:
        InvalidOption: something in which no tensors can be looked for.
    """
    seen: set[int] = set()
    # What was looked at is kept alive, or the id of a temporary might be given to another object.
    pending, kept = [resident], []
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _NO_TENSORS):
            continue
        seen.add(id(item))
        kept.append(item)
        parts = list(_parts(item))
        if isinstance(item, torch.Tensor) and _is_dense(item):
            yield item
        pending.extend(parts)


def _parts(item: object) -> Iterable[object]:
    """What to look at after ``item``."""
    if isinstance(item, torch.Tensor):
        return _parts_of_tensor(item)
    if isinstance(item, torch.nn.Module):
        return [*item.parameters(), *item.buffers()]
    if isinstance(item, torch.optim.Optimizer):
        return [item.param_groups, item.state]
    if isinstance(item, Mapping):
        # An optimizer's state has the parameters as keys.
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, Set)):
        return item
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, part.name, None) for part in dataclasses.fields(item)]
    opaque = isinstance(item, (type, types.ModuleType)) or callable(item)
    if opaque or not hasattr(item, "__dict__"):
        raise InvalidOption(
            f"cannot look for tensors in {item!r} of type {type(item).__name__}; resident takes "
            "modules, optimizers, tensors and containers of them"
        )
    return vars(item).values()


def _parts_of_tensor(tensor: torch.Tensor) -> list[Any]:
    # Reading .grad of a tensor that is no leaf warns; such a tensor keeps it only if asked to.
    parts: list[Any] = [tensor.grad] if tensor.is_leaf or tensor.retains_grad else []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts += [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        parts += [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts += [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts += [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return parts


def _is_dense(tensor: torch.Tensor) -> bool:
    """It owns one storage of its own: neither sparse nor a wrapper of other tensors."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type:
        return False
    return device.index is None or tensor.device.index == device.index


def _watched_device(device: torch.device | str | None, resident: object) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = {tensor.device for tensor in resident_tensors(resident)}
    on_cuda = sorted((d for d in devices if d.type == "cuda"), key=lambda d: d.index or 0)
    if on_cuda:
        return on_cuda[0]
    others = {d.type for d in devices} - {"cpu", "meta"}
    # An accelerator nobody can watch is named by Allocations, with what can be watched.
    return torch.device(min(others)) if others else torch.device("cpu")
