"""Predicted against measured bytes of a step, in characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from remat.report.names import cut_right
from remat.solvers.problem import Op
from remat.solvers.units import format_bytes

WIDTH: Final = 80
ROWS: Final = 10
_CHART_WIDTH: Final = 66
_CHART_HEIGHT: Final = 12

Row = tuple[Op, int, int]
"""An op, bytes predicted and bytes measured while it ran."""


def timeline_text(
    rows: Sequence[Row], unseen: int, resident: int, peak_outside: int | None = None
) -> str:
    """Both curves, both peaks, and the ops whose prediction is farthest off.

    Args:
        rows: in the order they ran.
        unseen: steps that nothing was measured of.
        resident: bytes that both figures begin with.
        peak_outside: the plan's peak, where code outside the graphs has it.
    """
    if not rows:
        return "timeline   no op of a planned graph ran"
    off = [row for row in rows if row[1] != row[2]]
    lines = [
        f"timeline   {len(rows)} ops watched, {unseen} steps of the plan not seen",
        _peak("predicted", max(rows, key=lambda row: row[1]), 1),
        _peak("measured", max(rows, key=lambda row: row[2]), 2),
        f"resident   {format_bytes(resident)} of both: parameters, inputs, state",
        *_outside(peak_outside),
        f"exact      {len(rows) - len(off)} of {len(rows)} ops to the byte",
        "",
        *_chart(rows),
        *_largest(off),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _outside(peak: int | None) -> Iterator[str]:
    if peak is not None:
        yield (
            f"outside    {format_bytes(peak)} is the plan's peak, in code between the graphs: not "
            "watched"
        )


def _peak(name: str, row: Row, which: int) -> str:
    op = row[0]
    figure = row[1] if which == 1 else row[2]
    text = f"{name:<11}peak {format_bytes(figure)} at {op.target or op.name}, {op.phase}"
    return cut_right(f"{text}{f', {op.layer}' if op.layer else ''}", WIDTH)


def _chart(rows: Sequence[Row]) -> list[str]:
    """``p`` predicted, ``m`` measured, ``*`` both; a column has the highest of its ops."""
    width = min(_CHART_WIDTH, len(rows))
    high = max(max(row[1], row[2]) for row in rows)
    low = min(min(row[1], row[2]) for row in rows)
    grid = [[" "] * width for _ in range(_CHART_HEIGHT)]
    for column in range(width):
        part = rows[column * len(rows) // width : (column + 1) * len(rows) // width]
        for which, mark in ((1, "p"), (2, "m")):
            level = max(row[which] for row in part)  # type: ignore[type-var]
            share = (high - level) / (high - low) if high > low else 0.0  # type: ignore[operator]
            line = grid[round(share * (_CHART_HEIGHT - 1))]
            line[column] = mark if line[column] == " " else "*"
    labels = [format_bytes(high), *[""] * (_CHART_HEIGHT - 2), format_bytes(low)]
    lines = [f"{label:>10} |{''.join(line)}" for label, line in zip(labels, grid, strict=True)]
    return [
        "bytes in use, op by op: p predicted, m measured, * both",
        *lines,
        f"{'':>10} +{'-' * width}",
    ]


def _largest(off: Sequence[Row]) -> list[str]:
    if not off:
        return []
    lines = ["", f"{'off by':>11}{'predicted':>12}{'measured':>12}  where the plan is farthest off"]
    for op, predicted, measured in sorted(off, key=lambda row: -abs(row[2] - row[1]))[:ROWS]:
        sign = "+" if measured > predicted else ""
        where = [op.target or op.name, op.layer, op.source]
        lines.append(
            cut_right(
                f"{sign + format_bytes(measured - predicted):>11}{format_bytes(predicted):>12}"
                f"{format_bytes(measured):>12}  {', '.join(part for part in where if part)}",
                WIDTH,
            )
        )
    if len(off) > ROWS:
        lines.append(f"and {len(off) - ROWS} more ops (timeline.largest)")
    return lines
