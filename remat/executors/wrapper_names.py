"""What the names of a generated wrapper stand for while it is replayed.

Allocations and library kernels run on fake tensors; generated kernels do nothing, for they write
into buffers that the wrapper has allocated. A name that is not here is not guessed at: looking it
up fails, and the replay names the line.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat.executors.wrapper_memory import Memory, Workspace

_ALLOCATING_DEVICES: Final = ("cpu", "cuda", "xpu", "mtia")
# Library kernels that are functions of torch; the others among ``extern_kernels`` are spelled out.
_EXTERN_FUNCTIONS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm", "_scaled_mm", "_grouped_mm"}
)
_DEVICE_MODULES: Final = ("cuda", "xpu", "mtia")


class UnknownName(LookupError):
    """The wrapper uses something the replay has no meaning for."""


class Names:
    """The namespace of one wrapper."""

    def __init__(self, memory: Memory, workspace: Workspace) -> None:
        self.memory = memory
        self.workspace = workspace

    def all(self) -> dict[str, Any]:
        """Name → what it stands for, of all that a wrapper imports or defines in its header."""
        nothing = _nothing
        names: dict[str, Any] = {
            "__builtins__": {
                "len": len,
                "range": range,
                "min": min,
                "max": max,
                "int": int,
                # clone() of a fake tensor imports by the builtins of the frame that calls it.
                "__import__": __import__,
            },
            "torch": _Torch(self),
            "aten": _Namespace(self, torch.ops.aten),
            "inductor_ops": _Namespace(self, torch.ops.inductor),
            "_quantized": _Namespace(self, torch.ops._quantized),
            "device": torch.device,
            "inf": math.inf,
            "nan": math.nan,
            "async_compile": _AsyncCompile(),
            "extern_kernels": _ExternKernels(self),
            "empty_strided": self._empty_strided,
            "reinterpret_tensor": _reinterpret,
            "alloc_from_pool": _alloc_from_pool,
            "assert_size_stride": _assert_size_stride,
            "assert_alignment": nothing,
            "start_graph": nothing,
            "end_graph": nothing,
            "run_intermediate_hooks": nothing,
            "get_raw_stream": nothing,
            # It returns its argument: what inductor takes for aligned is, on the second call on.
            "copy_if_misaligned": lambda tensor: tensor,
        }
        for device in _ALLOCATING_DEVICES:
            names[f"empty_strided_{device}"] = self._empty_strided_on(device)
        names["empty_strided_cpu_pinned"] = self._empty_strided_on("cpu")
        return names

    def _empty_strided_on(self, device: str) -> Callable[..., torch.Tensor]:
        def empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            return self._empty_strided(shape, stride, device=device, dtype=dtype)

        return empty

    def _empty_strided(
        self, shape: Any, stride: Any, *, device: str, dtype: torch.dtype
    ) -> torch.Tensor:
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.memory.adopt(made)
        return made

    def _transfer(self, op: torch._ops.OpOverload, result: Any) -> None:
        """A reload allocates what it fills; a token is none of the allocator's."""
        if op is torch.ops.remat.reload.default:
            self.memory.adopt(result)
        else:
            self.memory.own(result)

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a library kernel on fake tensors and count what it allocates."""
        with _Recorder() as recorder:
            result = op(*args, **kwargs)
        overload = op if isinstance(op, torch._ops.OpOverload) else recorder.first
        if overload is None:
            raise UnknownName(f"{op} ran no operator")
        if overload.namespace == "remat":
            self._transfer(overload, result)
            return result
        taken = self.workspace(overload, args, kwargs, result)
        self.memory.adopt(result, taken.retained)
        self.memory.work(taken.workspace)
        return result


class _Recorder(TorchDispatchMode):
    """Which overload a packet chose."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.first = self.first or func
        return func(*args, **(kwargs or {}))


class _Op:
    """An operator of torch (a packet or an overload)."""

    def __init__(self, names: Names, op: Any) -> None:
        self._names = names
        self._op = op

    def __getattr__(self, name: str) -> _Op:
        return _Op(self._names, getattr(self._op, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self._op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise UnknownName(f"{self._op} is not an operator that can be replayed")
        return self._names.call(self._op, args, kwargs)


class _Namespace:
    """``torch.ops.<namespace>``."""

    def __init__(self, names: Names, namespace: Any) -> None:
        self._names = names
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        if self._namespace is torch.ops.inductor and name == "_alloc_from_pool":
            return _alloc_from_pool
        return _Op(self._names, getattr(self._namespace, name))


class _Operators:
    """``torch.ops``."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __getattr__(self, name: str) -> _Namespace:
        return _Namespace(self._names, getattr(torch.ops, name))


class _Torch:
    """The part of ``torch`` that wrappers use."""

    def __init__(self, names: Names) -> None:
        self.ops = _Operators(names)
        self.device = torch.device

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name, None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        if name in _DEVICE_MODULES:
            return _DeviceModule()
        raise UnknownName(f"torch.{name}")


class _DeviceModule:
    """``torch.cuda`` and its like: which device is current allocates nothing."""

    def _DeviceGuard(self, index: int) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def set_device(self, index: int) -> None:
        """The guard has set it."""


class _ExternKernels:
    """``extern_kernels``: library kernels by the names inductor gives them."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name in _EXTERN_FUNCTIONS:
            return _Op(self._names, getattr(torch.ops.aten, name))
        raise UnknownName(f"extern_kernels.{name}")

    def bias_addmm(self, bias: Any, a: Any, b: Any, **options: Any) -> Any:
        """``addmm`` with a bias given as a whole matrix, of which one row is read."""
        row = bias[0] if bias.stride(0) == 0 or bias.size(0) == 1 else bias
        return _Op(self._names, torch.ops.aten.addmm)(row, a, b, **options)

    def _mm_plus_mm(self, a: Any, b: Any, c: Any, d: Any, *, out: Any) -> Any:
        _Op(self._names, torch.ops.aten.mm)(a, b, out=out)
        return _Op(self._names, torch.ops.aten.addmm_)(out, c, d)


class Kernel:
    """A generated kernel: it writes into what it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is allocated."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is allocated."""


class _AsyncCompile:
    """Whatever it compiles, it returns a kernel."""

    def __getattr__(self, name: str) -> Callable[..., Kernel]:
        return lambda *args, **kwargs: Kernel()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A call that neither allocates nor frees."""


def _reinterpret(tensor: Any, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offset)


def _alloc_from_pool(
    pool: torch.Tensor, offset: int, dtype: torch.dtype, shape: Any, stride: Any
) -> torch.Tensor:
    size = dtype.itemsize
    whole = pool[offset : pool.numel() - (pool.numel() - offset) % size]
    return torch.as_strided(whole.view(dtype), shape, stride)


def _assert_size_stride(tensor: torch.Tensor, shape: Any, stride: Any, *_: Any) -> None:
    """Where fake tensors err about a kernel's layout, the wrapper knows the true one."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"it has shape {tuple(tensor.shape)}")
    if tuple(tensor.stride()) != tuple(stride):
        tensor.as_strided_(shape, stride)
