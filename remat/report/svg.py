"""The frontier as a picture: one SVG file that needs nothing else, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from remat.solvers.units import format_bytes

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 44, 56

_STYLE: Final = """
text { font: 13px system-ui, sans-serif; fill: #222 }
.title { font-weight: 600; font-size: 15px }
.page { fill: #fff } .grid { stroke: #ddd } .axis { stroke: #888 }
.curve { fill: none; stroke: #0b62c4; stroke-width: 2.5 }
.bound { fill: none; stroke: #0b62c4; stroke-width: 1.5; stroke-dasharray: 4 4; opacity: .6 }
.dot { fill: #0b62c4 } .baseline { fill: #c2410c }
.this { fill: none; stroke: #222; stroke-width: 2 }
.knee { fill: none; stroke: #c2410c; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6e6 } .page { fill: #16181d } .grid { stroke: #33363d }
  .axis { stroke: #888 } .curve, .bound { stroke: #6cb0ff } .dot { fill: #6cb0ff }
  .baseline { fill: #fb923c } .this { stroke: #e6e6e6 } .knee { stroke: #fb923c }
}
"""

Row = tuple[int, float, float]
"""Peak in bytes, extra time, and the extra time that no plan can beat."""


def frontier_svg(
    rows: Sequence[Row],
    baseline_peak: int,
    *,
    here: tuple[int, float] | None = None,
    knee: int | None = None,
    inline: bool = False,
) -> str:
    """Extra time (in %) against peak, with the proven bound dashed and the baseline marked.

    Args:
        rows: ordered by peak.
        baseline_peak: bytes without remat.
        here: peak and extra time of a plan to mark with a ring.
        knee: index of the row to mark as the knee.
        inline: leave out the style: the page that the picture becomes a part of has it.
    """
    scale = _Scale([*rows, *([(*here, here[1])] if here else [])], baseline_peak)
    style = "" if inline else f"<style>{_STYLE}</style>"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'class="frontier">',
        f"<title>Extra time against peak memory</title>{style}",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="24">Extra time by peak memory</text>',
        *_axes(scale),
        f'<path class="bound" d="{_path(scale, [(peak, bound) for peak, _, bound in rows])}"/>',
        f'<path class="curve" d="{_path(scale, [(peak, extra) for peak, extra, _ in rows])}"/>',
    ]
    for peak, extra, bound in rows:
        tip = f"{format_bytes(peak)}: {extra:+.1%} time (proven: at least {bound:+.1%})"
        x, y = scale.x(peak), scale.y(extra)
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{tip}</title></circle>'
        )
    if here:
        x, y = scale.x(here[0]), scale.y(here[1])
        tip = f"this plan: {format_bytes(here[0])}, {here[1]:+.1%} time"
        parts.append(f'<circle class="this" cx="{x:.1f}" cy="{y:.1f}" r="9">')
        parts.append(f"<title>{tip}</title></circle>")
    if knee is not None:
        parts += _knee(scale, *rows[knee][:2])
    parts += _baseline(scale, baseline_peak)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _baseline(scale: _Scale, peak: int) -> list[str]:
    x, y, right = scale.x(peak), scale.y(0.0), WIDTH - RIGHT
    tip = f"without remat: {format_bytes(peak)}"
    return [
        f'<rect class="baseline" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10">'
        f"<title>{tip}</title></rect>",
        f'<rect class="baseline" x="{right - 10}" y="16" width="10" height="10"/>',
        f'<text x="{right - 16}" y="26" text-anchor="end">{tip}</text>',
    ]


def _knee(scale: _Scale, peak: int, extra: float) -> list[str]:
    x, y = scale.x(peak), scale.y(extra)
    label = f"knee: {format_bytes(peak)}, {extra:+.1%} time"
    aside, anchor = (12, "start") if x < WIDTH / 2 else (-12, "end")  # towards the middle
    return [
        f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>{label}</title></circle>',
        f'<text x="{x + aside:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">{label}</text>',
    ]


class _Scale:
    def __init__(self, rows: Sequence[Row], baseline_peak: int) -> None:
        peaks = [baseline_peak, *(peak for peak, _, _ in rows)]
        extras = [0.0, *(value for _, extra, bound in rows for value in (extra, bound))]
        self.low, self.high = min(peaks), max(peaks)
        self.bottom, self.top = min(extras), max(max(extras), 0.01)

    def x(self, peak: float) -> float:
        share = (peak - self.low) / max(1, self.high - self.low)
        return LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24)

    def y(self, extra: float) -> float:
        share = (extra - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _axes(scale: _Scale) -> list[str]:
    floor = HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none"/>']
    for extra in _ticks(scale.bottom, scale.top):
        y, label = scale.y(extra), f"{100 * extra:+.3g} %" if abs(extra) > 1e-12 else "0"
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    steps = 4 if scale.high > scale.low else 0  # one peak alone has one label
    for k in range(steps + 1):
        peak = scale.low + (scale.high - scale.low) * k / max(1, steps)
        x = scale.x(peak)
        parts.append(f'<text x="{x:.1f}" y="{floor + 20}" text-anchor="middle">')
        parts.append(f"{format_bytes(peak)}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">peak memory</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers in [low, high]."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [k * step for k in range(first, last + 1)]


def _path(scale: _Scale, points: Sequence[tuple[int, float]]) -> str:
    steps = [f"{scale.x(peak):.1f} {scale.y(extra):.1f}" for peak, extra in points]
    return "M" + "L".join(steps) if steps else ""
