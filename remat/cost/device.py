"""Devices: what is there, and what is only described.

The described ones carry the peaks of their datasheets, without sparsity. Real kernels reach 60 to
80 % of them, about alike for arithmetic and for bandwidth, so that the ratio of two ops is better
than either figure. Datasheet gigabytes are read as 10^9 bytes, which is never more than torch
reports as the device's memory.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from remat.budget import machine_memory
from remat.cost.isolation import outside_modes
from remat.cost.store import Store, environment, processor_name
from remat.passes.attention import Capability
from remat.passes.storages import main_device
from remat.solvers.errors import InvalidOption

_TERA: Final = 1e12
_GIGA: Final = 1e9
# A kernel launch from Python, dispatcher included, with the queue never empty.
_GPU_LAUNCH_SECONDS: Final = 5e-6
_GPU_GRANULARITY: Final = 512
# What the wheels of torch for CUDA 13 bring along.
_ASSUMED_CUDNN: Final = 91501
_PROBED_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")
# Far above any cache of a processor, far below any memory.
_COPIED_BYTES: Final = 2**26


@dataclass(frozen=True)
class DeviceSpec:
    """A device, as far as costs depend on it.

    Attributes:
        name: the name it is found by.
        memory: bytes.
        matrix_rates: FLOP/s of matrix products by dtype name (``"bfloat16"``); ``"float32"`` is
            always there and means full precision, torch's default.
        bandwidth: bytes/s between the device's memory and its processors, reads plus writes.
        launch: seconds that any op takes at least.
        granularity: the allocator hands out multiples of this many bytes.
        source: where the figures are from.
        torch_device: the device of this machine that the spec is of, or None if it is only
            described: nothing can be run there.
        capability: what its attention kernels are chosen by; None where that is not CUDA's way.
    """

    name: str
    memory: int
    matrix_rates: Mapping[str, float] = field(hash=False)
    bandwidth: float
    launch: float
    granularity: int
    source: str
    torch_device: str | None = None
    capability: Capability | None = None

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products in ``dtype``; that of float32 where the source names none."""
        name = str(dtype).removeprefix("torch.")
        return self.matrix_rates.get(name, self.matrix_rates["float32"])


def _gpu(
    name: str,
    gigabytes: float,
    gigabytes_per_second: float,
    source: str,
    compute: tuple[int, int] | None,
    **teraflops: float,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory=int(gigabytes * _GIGA),
        matrix_rates=MappingProxyType({d: rate * _TERA for d, rate in teraflops.items()}),
        bandwidth=gigabytes_per_second * _GIGA,
        launch=_GPU_LAUNCH_SECONDS,
        granularity=_GPU_GRANULARITY,
        source=f"{source}; launch {_GPU_LAUNCH_SECONDS * 1e6:.0f} us assumed",
        capability=None if compute is None else Capability(compute, _ASSUMED_CUDNN),
    )


def _hopper(**rates: float) -> dict[str, float]:
    return rates | {"float8_e4m3fn": 2 * rates["bfloat16"], "float8_e5m2": 2 * rates["bfloat16"]}


_A100 = dict(float64=19.5, float32=19.5, bfloat16=312.0, float16=312.0, int8=624.0)
_H100_SXM = _hopper(float64=67.0, float32=67.0, bfloat16=989.4, float16=989.4, int8=1978.9)
_H100_PCIE = _hopper(float64=51.0, float32=51.0, bfloat16=756.0, float16=756.0, int8=1513.0)

KNOWN: Final[Mapping[str, DeviceSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gpu("a100-40gb", 40, 1555, "NVIDIA A100 datasheet (2021), 40 GB", (8, 0), **_A100),
            _gpu("a100-80gb", 80, 2039, "NVIDIA A100 datasheet (2021), 80 GB SXM", (8, 0), **_A100),
            _gpu("h100-sxm", 80, 3350, "NVIDIA H100 datasheet (2023), SXM5", (9, 0), **_H100_SXM),
            _gpu("h100-pcie", 80, 2000, "NVIDIA H100 datasheet (2023), PCIe", (9, 0), **_H100_PCIE),
            _gpu("h200", 141, 4800, "NVIDIA H200 datasheet (2023), SXM5", (9, 0), **_H100_SXM),
            _gpu("gh200", 96, 4000, "NVIDIA GH200 datasheet (2023), 96 GB", (9, 0), **_H100_SXM),
            _gpu(
                "b200", 180, 7700, "NVIDIA HGX B200 datasheet (2024); sparse rates halved", (10, 0),
                float64=37.0, float32=75.0, bfloat16=2250.0, float16=2250.0, int8=4500.0,
                float8_e4m3fn=4500.0, float8_e5m2=4500.0,
            ),
            _gpu(
                "a10", 24, 600, "NVIDIA A10 datasheet (2021)", (8, 6),
                float64=0.98, float32=31.2, bfloat16=125.0, float16=125.0, int8=250.0,
            ),
            _gpu(
                "rtx-a6000", 48, 768, "NVIDIA Ampere GA102 whitepaper (2021)", (8, 6),
                float64=1.21, float32=38.7, bfloat16=154.8, float16=154.8, int8=309.7,
            ),
            _gpu(
                "l40s", 48, 864, "NVIDIA L40S datasheet (2023); sparse rates halved", (8, 9),
                float64=1.43, float32=91.6, bfloat16=362.0, float16=362.0, int8=733.0,
                float8_e4m3fn=733.0, float8_e5m2=733.0,
            ),
            _gpu(
                "rtx-3090", 24, 936,
                "NVIDIA Ampere GA102 whitepaper (2021), accumulation in float32", (8, 6),
                float64=0.56, float32=35.6, bfloat16=71.0, float16=71.0, int8=284.0,
            ),
            _gpu(
                "rtx-5090", 32, 1792,
                "NVIDIA RTX Blackwell whitepaper (2025), accumulation in float32", (12, 0),
                float64=1.64, float32=104.8, bfloat16=209.5, float16=209.5, int8=838.0,
                float8_e4m3fn=419.0, float8_e5m2=419.0,
            ),
            _gpu(
                "l4", 24, 300, "NVIDIA L4 datasheet (2023); sparse rates halved", (8, 9),
                float64=0.47, float32=30.3, bfloat16=121.0, float16=121.0, int8=242.5,
                float8_e4m3fn=242.5, float8_e5m2=242.5,
            ),
            _gpu(
                "rtx-4090", 24, 1008,
                "NVIDIA Ada architecture whitepaper (2022), accumulation in float32", (8, 9),
                float64=1.29, float32=82.6, bfloat16=165.2, float16=165.2, int8=660.6,
                float8_e4m3fn=330.3, float8_e5m2=330.3,
            ),
            _gpu(
                "mi300x", 192, 5300, "AMD Instinct MI300X datasheet (2023)", None,
                float64=163.4, float32=163.4, bfloat16=1307.4, float16=1307.4, int8=2614.9,
                float8_e4m3fnuz=2614.9, float8_e5m2fnuz=2614.9,
            ),
        )
    }
)  # fmt: skip
_ALIASES: Final = {
    "a100": "a100-80gb", "h100": "h100-sxm", "3090": "rtx-3090", "4090": "rtx-4090",
    "5090": "rtx-5090", "a6000": "rtx-a6000",
}  # fmt: skip


def find_device(
    device: str | torch.device | None = None, tensors: Iterable[torch.Tensor] = ()
) -> DeviceSpec:
    """The spec of a device.

    Args:
        device: a name (``"h100"``, ``"rtx 4090"``), which describes a device that need not be
            here; ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a torch.device, which must be here. None:
            the device that holds most bytes of ``tensors``; the CPU if there are none.

    Raises:
        InvalidOption: nobody is called that (the message suggests the nearest), or the device is
            not here.
    """
    if device is None:
        device = main_device(tensors)
    if isinstance(device, str) and device.split(":")[0] not in ("cpu", "cuda"):
        return _described(device)
    try:
        there = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidOption(f"device {device!r}: {error}") from error
    if there.type == "cpu":
        return _probed(torch.device("cpu"), processor_name())
    if there.type == "cuda":
        return _cuda(there)
    raise InvalidOption(
        f"device {str(there)!r} is not one remat has costs for; it takes cpu, cuda, "
        f"{', '.join(KNOWN)}"
    )


def described_capability(device: str | None) -> Capability | None:
    """What attention is routed by in a plan for ``device``; None where nothing is to be routed: the
    device is here, or is not CUDA's.

    Raises:
        InvalidOption: nobody is called that.
    """
    spec = None if device is None else find_device(device)
    return None if spec is None or spec.torch_device is not None else spec.capability


def _described(name: str) -> DeviceSpec:
    names = {_plain(known): known for known in KNOWN}
    names |= {_plain(alias): known for alias, known in _ALIASES.items()}
    if _plain(name) in names:
        return KNOWN[names[_plain(name)]]
    known = sorted([*KNOWN, *_ALIASES, "cpu", "cuda"])
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidOption(f"unknown device {name!r}{hint} (known: {', '.join(known)})")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _cuda(device: torch.device) -> DeviceSpec:
    if not torch.cuda.is_available():
        raise InvalidOption(
            f"device {str(device)!r} is not here: this torch sees no CUDA device; "
            f"to plan for one that is elsewhere, name it: {', '.join(KNOWN)}"
        )
    name = torch.cuda.get_device_name(device)
    spec = known_gpu(name) or _probed(device, name)
    memory, _ = machine_memory(str(device))
    compute, cudnn = torch.cuda.get_device_capability(device), torch.backends.cudnn.version()
    capability = Capability(compute, cudnn or 0) if torch.version.hip is None else None
    return replace(spec, memory=memory, torch_device=str(device), capability=capability)


def known_gpu(driver_name: str) -> DeviceSpec | None:
    """The spec of the GPU that the driver calls so, or None if it is not described."""
    words = _plain(driver_name)
    if "a100" in words:
        return KNOWN["a100-40gb" if "40gb" in words else "a100-80gb"]
    if "h100" in words:
        return KNOWN["h100-pcie" if "pcie" in words else "h100-sxm"]
    if "gh200" in words:
        return KNOWN["gh200"]
    for name in ("l4", "l40s", "a10", "b200", "rtx-a6000"):
        if words == _plain(f"nvidia {name}"):
            return KNOWN[name]
    for name in ("rtx-3090", "rtx-5090"):
        if words == _plain(f"nvidia geforce {name}"):
            return KNOWN[name]
    return next((KNOWN[k] for k in ("h200", "rtx-4090", "mi300x") if _plain(k) in words), None)


def _probed(device: torch.device, name: str) -> DeviceSpec:
    """The device itself, timed once (under a second) and remembered on disk."""
    store = Store("device", environment(device))
    if "probe" not in store:
        store.put("probe", outside_modes(lambda: _probe(device), device))
        store.save()
    figures: dict[str, Any] = store["probe"]
    return DeviceSpec(
        name="cpu" if device.type == "cpu" else name,
        memory=machine_memory(str(device))[0],
        matrix_rates=MappingProxyType(figures["matrix_rates"]),
        bandwidth=figures["bandwidth"],
        launch=figures["launch"],
        # The CPU allocator reports what it was asked for (it aligns, but does not round).
        granularity=1 if device.type == "cpu" else _GPU_GRANULARITY,
        source=f"probed on {name}",
        torch_device=str(device),
    )


def _probe(device: torch.device) -> dict[str, Any]:
    source = torch.zeros(_COPIED_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    one = torch.zeros(1, device=device)
    copying = _fastest(partial(target.copy_, source), device, repeats=9)
    if device.type == "cpu":
        with _one_thread() as threads:
            rates = {name: threads * _matrix_rate(name, device) for name in _PROBED_DTYPES}
    else:
        rates = {name: _matrix_rate(name, device) for name in _PROBED_DTYPES}
    return {
        "matrix_rates": rates,
        "bandwidth": 2 * _COPIED_BYTES / copying,
        "launch": _fastest(one.neg_, device, repeats=50),
    }


@contextmanager
def _one_thread() -> Iterator[int]:
    """One thread computes; yields how many did before.

    Where other processes want the same cores, threads that wait for each other stall for tens of
    milliseconds at every product, and a rate timed so would be remembered for good.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _matrix_rate(dtype_name: str, device: torch.device) -> float:
    """FLOP/s of square products: the best over widths, larger ones until 0.1 s are spent."""
    dtype = getattr(torch, dtype_name)
    rate, start = 0.0, time.perf_counter()
    for width in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        matrix = torch.full((width, width), 0.5, dtype=dtype, device=device)
        seconds = _fastest(partial(torch.mm, matrix, matrix), device, repeats=3)
        rate = max(rate, 2 * width**3 / seconds)
        if time.perf_counter() - start > 0.1:
            break
    return rate


def _fastest(function: Any, device: torch.device, repeats: int) -> float:
    """Least wall time of ``repeats`` calls, after one that is not counted, in seconds."""
    best = math.inf
    function()
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
