"""How much memory a step may take: what ``memory_budget`` means, and what the machine has.

``1`` is one byte, ``1.0`` is the whole baseline: an ``int`` counts bytes, a ``float`` is a fraction
of the way from the least peak to the baseline's.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

from remat.solvers.errors import InvalidOption
from remat.solvers.units import parse_bytes

BudgetKind = Literal["none", "bytes", "device_share", "auto", "fraction"]

MEANT: Final = (
    'write bytes (8589934592, "8GiB", "512MB"), a share of the device ("80%"), "auto", a float '
    "from 0.0 (the least peak a plan is found for) to 1.0 (no saving), or None (no budget)"
)
# What "auto" leaves free: fragmentation, the libraries' own workspaces, whoever else is there.
AUTO_MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Budget:
    """What ``memory_budget`` asked for.

    Attributes:
        kind: how to read ``value``.
        value: bytes; or a share or fraction in [0, 1]; 0 for ``none`` and ``auto``.
    """

    kind: BudgetKind
    value: float = 0

    @property
    def needs_device(self) -> bool:
        """Whether :meth:`resolve` must be told the device's memory."""
        return self.kind in ("device_share", "auto")

    def resolve(
        self,
        *,
        baseline_peak: int,
        least_peak: Callable[[], int],
        device_total: int | None = None,
        device_free: int | None = None,
    ) -> int | None:
        """The budget in bytes; None if there is none.

        Args:
            baseline_peak: peak of what the executor does unasked, in bytes.
            least_peak: the smallest peak a plan is found for, in bytes; it is expensive, and is
                called for a fraction below 1.0 only.
            device_total: the device's memory, in bytes.
            device_free: bytes this step may take there: what is free, and what the step's own
                parameters and inputs hold there already.

        Raises:
            InvalidOption: the device's memory is asked for and unknown, or nothing of it is free.
        """
        if self.kind == "none":
            return None
        if self.kind == "bytes":
            return int(self.value)
        if self.kind == "device_share":
            return int(self.value * self._known(device_total))
        if self.kind == "auto":
            return self._all_but_the_margin(self._known(device_free))
        if self.value == 1:
            return baseline_peak
        least = least_peak()
        return least + int(self.value * max(0, baseline_peak - least))

    def _known(self, figure: int | None) -> int:
        if figure is None:
            asked = "auto" if self.kind == "auto" else f"{100 * self.value:g}%"
            raise InvalidOption(
                f'memory_budget="{asked}": the memory of this device is unknown; '
                'write bytes instead, like "8GiB"'
            )
        return figure

    def _all_but_the_margin(self, free: int) -> int:
        if free <= 0:
            raise InvalidOption(
                'memory_budget="auto": nothing is free on the device; end what holds its memory, '
                'or write bytes, like "8GiB"'
            )
        return int(free * (1 - AUTO_MARGIN))


def parse_budget(asked: object) -> Budget:
    """Read ``memory_budget``.

    Raises:
        InvalidOption: it means nothing; the message shows what is meant.
    """
    if asked is None:
        return Budget("none")
    if isinstance(asked, bool):
        _refuse(asked, "is a bool")
    if isinstance(asked, numbers.Integral):
        return _bytes(asked, int(asked))
    if isinstance(asked, float):
        if math.isnan(asked):
            _refuse(asked, "is not a number")
        if not 0 <= asked <= 1:
            _refuse(asked, "is a float outside [0.0, 1.0]; an int counts bytes")
        return Budget("fraction", float(asked))
    if isinstance(asked, str):
        return _parse_text(asked)
    _refuse(asked, f"is a {type(asked).__name__}")


def _parse_text(asked: str) -> Budget:
    text = asked.strip()
    if text.lower() == "auto":
        return Budget("auto")
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            _refuse(asked, "is no percentage")
        if not 0 < percent <= 100:
            _refuse(asked, "is outside (0%, 100%]")
        return Budget("device_share", percent / 100)
    if "." in text and text[-1:].isdigit():
        _refuse(asked, "has a fraction and no unit; a fraction is a float, without the quotes")
    try:
        count = parse_bytes(text)
    except InvalidOption:
        _refuse(asked, "is no byte size")
    return _bytes(asked, count)


def _bytes(asked: object, count: int) -> Budget:
    if count <= 0:
        _refuse(asked, f"is {count} bytes, in which nothing fits; 0.0 asks for the least peak")
    return Budget("bytes", count)


def _refuse(asked: object, why: str) -> NoReturn:
    raise InvalidOption(f"memory_budget={asked!r} {why}; {MEANT}")


def machine_memory(device: str = "cpu") -> tuple[int, int]:
    """(total, free) bytes of ``device``.

    CPU: the machine's memory, or less where a cgroup (version 1 or 2) limits this process. CUDA:
    what the driver says, with what this process's caching allocator holds unused counted as free.

    Raises:
        InvalidOption: this system does not say, or the device is not there.
    """
    kind = device.split(":")[0]
    if kind == "cpu":
        return _cpu_memory(Path("/"))
    if kind == "cuda":
        return _cuda_memory(device)
    raise InvalidOption(f'the memory of device {device!r} is unknown; write bytes, like "8GiB"')


def _cuda_memory(device: str) -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        raise InvalidOption(
            f"device {device!r} is not there, so its memory is unknown; "
            'write bytes instead of a share of it, like "8GiB"'
        )
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total, free + unused


def _cpu_memory(root: Path) -> tuple[int, int]:
    total, free = _physical_memory(root)
    for limit, used in _cgroup_limits(root):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _physical_memory(root: Path) -> tuple[int, int]:
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        rows = _pairs(meminfo.read_text().replace(":", ""))
        return rows["MemTotal"] * 1024, rows["MemAvailable"] * 1024
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError) as error:
        raise InvalidOption(
            'this system does not say how much memory it has; write bytes, like "8GiB"'
        ) from error
    # Darwin has no count of available pages: all of it, as if nobody else were there.
    available = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else None
    return total, total if available is None else available * page


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of this process's memory cgroup and every one above it."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may name a folder of the host: then only the mount itself is left.
        inside = Path(path.lstrip("/"))
        found += [_cgroup_limit(mount / part, *files) for part in (inside, *inside.parents)]
    return [pair for pair in found if pair is not None]


def _cgroup_limit(folder: Path, limit_file: str, usage_file: str) -> tuple[int, int] | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / usage_file).read_text())
    except OSError:  # not a cgroup, or one we may not look into: it sets no limit we can know
        return None
    if not limit.isdigit():  # "max"
        return None
    stat = folder / "memory.stat"
    rows = _pairs(stat.read_text()) if stat.exists() else {}
    reclaimable = rows.get("total_inactive_file", rows.get("inactive_file", 0))
    return int(limit), max(0, used - reclaimable)


def _pairs(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
