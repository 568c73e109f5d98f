"""A plan as one page: a single HTML file that loads nothing, opens anywhere, and can be sent.

The figures at the top, the frontier and the text are written here; charts, table and graph are
drawn by the scripts in ``page/`` from the data in the page. Its content security policy allows
those scripts and that style alone, by their hashes, and no connection to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final

from remat.files import write_whole
from remat.report.curve import knee_of
from remat.report.html_curve import CurvePoint
from remat.report.html_data import Subject, page_data
from remat.report.svg import frontier_svg
from remat.report.text import peak_place, plan_text
from remat.solvers.units import format_bytes, format_seconds, format_share
from remat.version import __version__

if TYPE_CHECKING:
    from remat.plans import Plan

SCRIPTS: Final = ("words.js", "judge.js", "chart.js", "table.js", "layers.js", "main.js")


def subject_of(plan: Plan) -> Subject:
    """What a page about the plan of one graph shows."""
    return Subject(
        title=f"remat plan: {plan.problem.name or plan.graph_hash[:12]}",
        facts=(
            ("", f"{plan.executor} on {plan.device}"),
            ("costs", plan.problem.cost),
            ("torch", plan.torch_version),
            ("remat", plan.remat_version),
            ("graph", plan.graph_hash[:12]),
            ("offload to", plan.offload or ""),
        ),
        problem=plan.problem,
        solution=plan.solution,
        baseline=plan.baseline,
        baseline_timeline=plan.baseline_timeline,
        # Of a step: what a change would do to its peak is not known here.
        memory_budget=None if plan.in_step else plan.memory_budget,
        peak=plan.peak,
        replayed_peak=None if plan.executor == "eager" else plan.replayed_peak,
        least_peak=plan.least_peak,
        extra_time=plan.extra_time,
        extra_flops=plan.extra_flops,
        notes=plan.notes,
        text=plan_text(plan),
        link=plan.link,
    )


def write_page(
    path: str | Path, subject: Subject, frontier: Sequence[CurvePoint] | None = None
) -> None:
    """Write the page to ``path``.

    Args:
        frontier: the curve of the same problem, ordered by peak; the page says how to compute it
            where it is None.
    """
    write_whole(path, page_html(subject, frontier))


def page_html(subject: Subject, frontier: Sequence[CurvePoint] | None = None) -> str:
    """The page as text."""
    script = "'use strict';\n" + "\n".join(map(_resource, SCRIPTS))
    style = _resource("page.css")
    return Template(_resource("page.html")).substitute(
        script_hash=_hash(script),
        style_hash=_hash(style),
        version=escape(__version__),
        title=escape(subject.title),
        style=style,
        facts=escape(" · ".join(f"{name} {text}".strip() for name, text in subject.facts if text)),
        figures="".join(map(_figure, _figures(subject))),
        before_peak=escape(f"peak {format_bytes(subject.baseline_timeline.peak)}"),
        after_peak=escape(_after_peak(subject)),
        frontier=_frontier(subject, frontier),
        notes=_notes(subject.notes),
        text=escape(subject.text),
        data=page_data(subject),
        script=script,
    )


def _resource(name: str) -> str:
    return (files("remat.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


Figure = tuple[str, str, str, str]
"""Name, figure, class of the figure, a line below it."""


def _figure(figure: Figure) -> str:
    name, big, kind, small = map(escape, figure)
    below = f'<div class="small">{small}</div>' if small else ""
    return f'<div><dt>{name}</dt><dd><div class="big {kind}">{big}</div>{below}</dd></div>'


def _figures(subject: Subject) -> Iterator[Figure]:
    solution, old = subject.solution, subject.baseline_timeline
    budget = subject.memory_budget
    over = budget is not None and subject.peak > budget
    least = subject.least_peak
    yield (
        "memory budget",
        "none" if budget is None else format_bytes(budget),
        "",
        "" if least is None else f"the least peak found is {format_bytes(least)}",
    )
    yield (
        "peak before",
        format_bytes(old.peak),
        "",
        f"at {peak_place(subject.problem, subject.baseline, old, short=True)}",
    )
    saved = f"{_percent(subject.peak / old.peak - 1)}, " if old.peak else ""
    place = peak_place(subject.problem, solution.schedule, solution.timeline, short=True)
    yield (
        "peak after",
        format_bytes(subject.peak),
        "over" if over else "good",
        f"{saved}at {place}",
    )
    if subject.replayed_peak is not None:
        yield (
            "peak predicted",
            format_bytes(solution.peak),
            "",
            "by the schedule, which is what is drawn here; the peak after is the one replayed from "
            "what will run",
        )
    yield (
        "extra time",
        _percent(subject.extra_time),
        "",
        f"{format_seconds(old.seconds)} → {format_seconds(solution.seconds)} a step, predicted; "
        f"extra FLOPs {_percent(subject.extra_flops)}",
    )
    yield "gap", *_gap(subject)


def _percent(share: float) -> str:
    return format_share(share).replace("-", "−")


def _gap(subject: Subject) -> tuple[str, str, str]:
    solution = subject.solution
    by = f"{solution.solver}, {format_seconds(solution.solve_time)}"
    if solution.status == "optimal":
        return "0 %", "", f"proven: no plan of its kind is faster ({by})"
    if not solution.fits:
        return solution.status, "over", f"no plan within the budget ({by})"
    least = format_seconds(min(solution.lower_bound, solution.seconds))
    share = 100 * solution.gap
    return (
        "< 0.01 %" if 0 < share < 0.005 else f"≤ {share:.2f} %",
        "",
        f"certified: no plan within the budget takes less than {least} ({by})",
    )


def _after_peak(subject: Subject) -> str:
    if subject.replayed_peak is None:
        return f"peak {format_bytes(subject.solution.peak)}"
    return (
        f"peak {format_bytes(subject.solution.peak)} predicted, "
        f"{format_bytes(subject.replayed_peak)} replayed"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"


def _frontier(subject: Subject, frontier: Sequence[CurvePoint] | None) -> str:
    """The curve and its points, or the command that computes it."""
    if frontier is not None and not frontier:
        return (
            "<p>No plan was found for any of the budgets: a longer time limit may find some.</p>"
            + _points(_known(subject), "what is known without it")
        )
    if frontier is None:
        return (
            "<p>The frontier of this plan was not computed: it takes a solve for each of its "
            "points. To have it here: <code>remat show PLAN.json --html PAGE.html --points 9"
            "</code>, or in Python <code>plan.to_html(path, frontier=remat.frontier(model, args))"
            "</code>.</p>" + _points(_known(subject), "what is known without it")
        )
    rows = [(point.peak, point.extra_time, point.least_extra_time) for point in frontier]
    baseline = subject.baseline_timeline.peak
    here = (subject.solution.peak, subject.extra_time)
    table = [
        (format_bytes(p.memory_budget), p.peak, p.extra_time, p.least_extra_time) for p in frontier
    ]
    knee = knee_of([(peak, extra) for peak, extra, _ in rows])
    picture = frontier_svg(rows, baseline, here=here, knee=knee, inline=True)
    legend = "The large ring is this plan; below the dashed line there is no plan."
    if knee is not None:
        legend += " From the knee on, saving more costs more than it did."
    points = _points(table, "the points of the curve, by budget")
    return f'{picture}<p class="muted">{legend}</p>{points}'


Row = tuple[str, int, float | None, float | None]


def _known(subject: Subject) -> list[Row]:
    rows: list[Row] = []
    if subject.least_peak is not None:
        rows.append(("least peak found", subject.least_peak, None, None))
    rows.append(("this plan", subject.solution.peak, subject.extra_time, None))
    rows.append(("without remat", subject.baseline_timeline.peak, 0.0, None))
    return rows


def _points(rows: Iterable[Row], caption: str) -> str:
    heads = ("", "peak", "extra time", "proven: at least")
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in heads[1:])
    lines = []
    for name, peak, extra, proven in rows:
        # Adding zero makes a rounded -0.0 a plain one.
        shares = (
            "–" if share is None else f"{round(100 * share, 2) + 0.0:+.2f} %"
            for share in (extra, proven)
        )
        cells = "".join(f'<td class="number">{cell}</td>' for cell in (format_bytes(peak), *shares))
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table><caption class="muted">{caption}</caption>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
