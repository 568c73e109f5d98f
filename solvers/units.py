"""Byte sizes and durations, read from and written for people."""

from __future__ import annotations

import re
from typing import Final

from remat.solvers.errors import InvalidOption

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30

_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """``"8GiB"``, ``"512 MB"``, ``"1.5gib"``, ``"4096"`` as bytes.

    Raises:
        InvalidOption: it is no byte size; the message shows what one looks like.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise InvalidOption(f'{text!r} is not a byte size; write it like "8GiB", "512MB" or "4096"')
    number, unit = match.group(1).replace("_", ""), _UNITS[match.group(2).lower()]
    return int(float(number) * unit) if "." in number else int(number) * unit


def format_bytes(count: float) -> str:
    """Binary units, three to four digits: ``"1.95 GiB"``, ``"411.4 MiB"``, ``"84 B"``."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            scaled = size / unit
            return f"{sign}{scaled:.2f} {name}" if scaled < 10 else f"{sign}{scaled:.1f} {name}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """``"1.24 s"``, ``"35.1 ms"``, ``"820 us"``."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def format_share(share: float) -> str:
    """A change in percent: ``"+8.0 %"``, ``"-6.6 %"``; ``"+0.0 %"`` if too small to be seen."""
    rounded = round(100 * share, 1) + 0.0  # adding zero makes a rounded -0.0 a plain one
    return f"{rounded:+.1f} %"
