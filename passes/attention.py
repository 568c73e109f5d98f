"""Attention as a CUDA device would run it, in a graph that is traced on the CPU.

``scaled_dot_product_attention`` is one function and several kernels, and what backward needs
depends on the kernel: flash, memory-efficient and cuDNN attention save their output, a logsumexp
and the seed of their dropout; the math path saves the probabilities, batch × heads × length². On
the CPU torch would choose among the CPU's kernels. Here it is chosen, and called, as torch's
dispatcher on CUDA does (``sdp_utils.cpp`` and ``attention.cpp`` in
``aten/src/ATen/native/transformers``), so that shapes, saved tensors and FLOPs are those of the
device.

Not modelled: kernels that the user turns off or prefers (``torch.nn.attention.sdpa_kernel``,
``torch.backends.cuda.enable_*_sdp``), nested tensors, flash attention 3 and 4 where they are turned
on, and ROCm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_HALF: Final = (torch.float16, torch.bfloat16)
# cuDNN is preferred from 9.15.1 on: before, lengths that 128 does not divide went wrong.
_CUDNN_PREFERRED: Final = 91501
_CUDNN_WIDE_HEADS: Final = 92201
_OPS: Final[dict[str, Kernel]] = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


@dataclass(frozen=True)
class Capability:
    """What the choice of a kernel depends on.

    Attributes:
        compute: (major, minor) of the compute capability.
        cudnn: version of cuDNN as an integer, 91501 for 9.15.1; 0 if there is none.
    """

    compute: tuple[int, int]
    cudnn: int = 0


@dataclass(frozen=True)
class Attention:
    """One call, as far as the choice depends on it; ``mask`` is None if there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    @property
    def trains(self) -> bool:
        """Whether a backward will come."""
        given = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


def choose_kernel(call: Attention, device: Capability) -> Kernel:
    """The kernel torch's dispatcher takes on a CUDA device."""
    if not _is_dense(call):
        return "math"
    if _prefers_cudnn(device) and _cudnn_takes(call, device):
        return "cudnn"
    if _flash_takes(call, device):
        return "flash"
    return "efficient" if _efficient_takes(call, device) else "math"


def _is_dense(call: Attention) -> bool:
    q, k, v = call.query, call.key, call.value
    if not q.ndim == k.ndim == v.ndim == 4 or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or not q.dtype == k.dtype == v.dtype:
        return False
    if call.grouped:
        return k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0
    return bool(q.shape[1] == k.shape[1] == v.shape[1])


def _prefers_cudnn(device: Capability) -> bool:
    return device.cudnn >= _CUDNN_PREFERRED and device.compute[0] in (9, 10)


def _cudnn_takes(call: Attention, device: Capability) -> bool:
    wide, high = call.query.shape[-1], call.value.shape[-1]
    limit = 256 if device.cudnn >= _CUDNN_WIDE_HEADS else 128
    if (wide, high) == (192, 128):
        limit = max(limit, 192)
    pairs_that_train = (256, 256), (192, 128)
    if call.trains and max(wide, high) > 128 and (wide, high) not in pairs_that_train:
        return False
    return (
        call.query.dtype in _HALF
        and max(wide, high) <= limit
        and wide % 8 == high % 8 == 0
        and (call.dropout * 16).is_integer()
        and call.key.shape[2] != 1
        and not (call.dropout and call.query.shape[2] == 1)
        and not torch.are_deterministic_algorithms_enabled()
        and _has_unit_strides(call)
    )


def _flash_takes(call: Attention, device: Capability) -> bool:
    width = call.query.shape[-1]
    return (
        device.compute >= (8, 0)
        and call.query.dtype in _HALF
        and call.mask is None
        and width == call.key.shape[-1] == call.value.shape[-1]
        and width <= 256
        and not (call.causal and call.query.shape[2] != call.key.shape[2])
        and _flash_trains(call, device)
        and _has_unit_strides(call)
    )


def _flash_trains(call: Attention, device: Capability) -> bool:
    """Backward for wide heads needs more shared memory than some GPUs have."""
    small = (8, 6) <= device.compute <= (8, 9) or (12, 0) <= device.compute <= (12, 1)
    if not (small and call.trains):
        return True
    width = call.query.shape[-1]
    return width <= 192 or (width > 224 and not call.dropout)


def _efficient_takes(call: Attention, device: Capability) -> bool:
    half = call.query.dtype in _HALF
    if device.compute >= (8, 0):
        known, align = half or call.query.dtype == torch.float32, 8 if half else 4
    else:
        known = call.query.dtype in (torch.float16, torch.float32)
        align = 8 if half and device.compute >= (7, 0) else 1
    width = call.query.shape[-1]
    aligned = width == call.key.shape[-1] and width % align == call.value.shape[-1] % align == 0
    # Newer versions take fewer heads of keys; those that do not run the path that needs more.
    grouped = call.query.shape[1] != call.key.shape[1]
    return known and aligned and not grouped and _has_unit_strides(call)


def _has_unit_strides(call: Attention) -> bool:
    given = (call.query, call.key, call.value)
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in given)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    device: Capability,
) -> Tensor:
    """``scaled_dot_product_attention`` by the ops that a CUDA device would run."""
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose_kernel(call, device)
    aten = torch.ops.aten
    if kernel == "math":
        rest = dict(scale=scale, enable_gqa=enable_gqa)
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, **rest
        )
        return found[0]
    mask = _additive(attn_mask, query.dtype)
    if kernel == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, _expanded(mask, call), call.trains, dropout_p, is_causal, scale=scale
        )
        return found[0]
    if kernel == "efficient":
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, _padded_mask(mask, call), call.trains, dropout_p, is_causal,
            scale=scale,
        )  # fmt: skip
        return found[0]
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    padded = (_to_multiple_of_8(tensor) for tensor in (query, key, value))
    found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
    return found[0] if width % 8 == 0 else found[0][..., :width]


def _to_multiple_of_8(tensor: Tensor) -> Tensor:
    lacking = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, lacking)) if lacking else tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of booleans as one to add."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _expanded(mask: Tensor | None, call: Attention) -> Tensor | None:
    if mask is None:
        return None
    q, k = call.query, call.key
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _padded_mask(mask: Tensor | None, call: Attention) -> Tensor | None:
    """The memory-efficient kernel reads rows of a mask in steps of 16 bytes or more."""
    if mask is None:
        return None
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return _expanded(mask, call)


_SDPA: Final = frozenset(
    {F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}
)


def route_attention(graph: fx.GraphModule, device: Capability) -> int:
    """Have every attention of a Dynamo graph run as on ``device``; how many there are."""
    count = 0
    routed = _routed(device)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _SDPA:
            node.target = routed
            count += 1
    if count:
        graph.recompile()
    return count


def _routed(device: Capability) -> Callable[..., Tensor]:
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, device=device)

    return attention


class RoutedAttention(TorchFunctionMode):
    """While it is entered, attention runs as on ``device``."""

    def __init__(self, device: Capability) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SDPA:
            return attend(*args, **(kwargs or {}), device=self._device)
        return func(*args, **(kwargs or {}))


def kernels_in(targets: Iterable[str]) -> Counter[Kernel]:
    """How often each kernel is called, by the names of the ops of a graph."""
    names = (target.split(".")[-2] if "." in target else target for target in targets)
    return Counter(_OPS[name] for name in names if name in _OPS)
