"""The frontier in characters, for a terminal, and its knee."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from remat.solvers.units import format_bytes

WIDTH: Final = 68
HEIGHT: Final = 12

Row = tuple[int, float, float]
"""Peak in bytes, extra time, and the extra time that no plan can beat."""


def knee_of(curve: Sequence[tuple[float, float]]) -> int | None:
    """The point of a falling curve that lies farthest below the chord between its ends.

    Both axes are scaled so that the ends are (0, 1) and (1, 0), which is what Satopää, Albrecht,
    Irwin and Raghavan do ("Finding a kneedle in a haystack", 2011); then the distance to the chord
    of a point (x, y) is (1 - x - y) / √2.

    Args:
        curve: (peak, extra time), the smallest peak first.

    Returns:
        Its index; None where no point lies below the chord, or an axis has no extent.
    """
    if len(curve) < 3:
        return None
    (left, top), (right, bottom) = curve[0], curve[-1]
    if right <= left or top <= bottom:
        return None
    below = [1 - (x - left) / (right - left) - (y - bottom) / (top - bottom) for x, y in curve]
    farthest = max(range(len(curve)), key=lambda index: below[index])
    return farthest if below[farthest] > 1e-9 else None


def frontier_curve(rows: Sequence[Row], baseline_peak: int, knee: int | None = None) -> list[str]:
    """Extra time against peak: ``o`` a plan, ``K`` the knee, ``B`` without remat, ``.`` between.

    Args:
        rows: ordered by peak.
        baseline_peak: bytes without remat.
        knee: index of the row to mark as the knee.
    """
    points = [(peak, extra) for peak, extra, _ in rows]
    peaks = [baseline_peak, *(peak for peak, _ in points)]
    extras = [0.0, *(extra for _, extra in points)]
    left, right, bottom, top = min(peaks), max(peaks), min(extras), max(extras)

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
