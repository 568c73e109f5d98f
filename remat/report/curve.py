"""The frontier in characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from remat.solvers.units import format_bytes

WIDTH: Final = 68
HEIGHT: Final = 12

Row = tuple[int, float, float]
"""Peak in bytes, extra time, and the extra time that no plan can beat."""


def frontier_curve(rows: Sequence[Row], baseline_peak: int, knee: int | None = None) -> list[str]:
    """Extra time against peak: ``o`` a plan, ``K`` the knee, ``B`` without remat, ``.`` between.

    Args:
        rows: ordered by peak.
        baseline_peak: bytes without remat.
        knee: index of the row to mark as the knee.
    """
    points = [(peak, extra) for peak, extra, _ in rows]
    left = min(baseline_peak, *(peak for peak, _ in points))
    right = max(baseline_peak, *(peak for peak, _ in points))
    bottom = min(0.0, *(extra for _, extra in points))
    top = max(0.0, *(extra for _, extra in points))

    def column(peak: float) -> int:
        return round((peak - left) / max(1, right - left) * (WIDTH - 1))

    def line(extra: float) -> int:
        share = (top - extra) / (top - bottom) if top > bottom else 1.0
        return round(share * (HEIGHT - 1))

    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for (peak, extra), (next_peak, next_extra) in pairwise(points):
        first, last = column(peak), column(next_peak)
        for at in range(first, last):
            share = (at - first) / (last - first)
            grid[line(extra + share * (next_extra - extra))][at] = "."
    for index, (peak, extra) in enumerate(points):
        grid[line(extra)][column(peak)] = "K" if index == knee else "o"
    grid[line(0.0)][column(baseline_peak)] = "B"
    labels = [f"{top:+.1%}", *[""] * (HEIGHT - 2), f"{bottom:+.1%}"]
    axis = f"{format_bytes(left)}{format_bytes(right):>{WIDTH - len(format_bytes(left))}}"
    return [
        "extra time by peak: o a plan, K the knee, B without remat",
        *(
            f"{label:>7} |{''.join(cells)}".rstrip()
            for label, cells in zip(labels, grid, strict=True)
        ),
        f"{'':>7} +{'-' * WIDTH}",
        f"{'':>9}{axis}",
    ]
