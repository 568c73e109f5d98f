"""A plan on one screen of eighty columns, and the words of a budget that is too small."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from remat.report.names import block, cut_left, cut_right, file_and_line
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from remat.plans import DecisionRow, LayerRow, PhaseRow, Plan
    from remat.report.judged import Judged
    from remat.solvers.problem import Op, Problem
    from remat.solvers.schedule import Schedule, Solution, Timeline

WIDTH: Final = 80
LAYER_ROWS: Final = 16
DECISION_ROWS: Final = 10
ALIVE_ROWS: Final = 6
NOTE_ROWS: Final = 6

_LAYER_WIDTH: Final = 32
_BAR_WIDTH: Final = 15


def plan_text(plan: Plan) -> str:
    """Budget, peak and where it is, extra time by phase, gap, bytes by layer, decisions, notes."""
    extra = f"{format_share(plan.extra_time)} time, {format_share(plan.extra_flops)} FLOPs"
    return sections_of(plan, _head(plan), extra, _phases(plan.phases))


def sections_of(
    plan: Judged, head: Sequence[tuple[str, str]], extra: str, phases: Sequence[str]
) -> str:
    """The report on a plan, of a graph or of a step.

    Args:
        head: what it begins with, as rows of a name and a text.
        extra: what it costs.
        phases: lines of its phases.
    """
    costs = plan.problem.cost
    rows = [
        *head,
        *_offloaded(plan),
        *_places(plan),
        ("extra", extra + (f"; costs {costs}" if costs else "")),
        ("gap", _gap(plan.solution)),
    ]
    sections = (
        [cut_right(f"{name:<11}{text}", WIDTH) for name, text in rows],
        phases,
        _layers(plan.by_layer(), plan.several_calls),
        _decisions(tuple(plan.decisions.values())),
        _notes(plan.notes),
    )
    lines = "\n\n".join("\n".join(section) for section in sections if section)
    return "\n".join(line.rstrip() for line in lines.splitlines())


def _head(plan: Plan) -> list[tuple[str, str]]:
    problem = plan.problem
    budget = "none" if plan.memory_budget is None else format_bytes(plan.memory_budget)
    least = "" if plan.least_peak is None else f", least {format_bytes(plan.least_peak)}"
    return [
        ("plan", f"{problem.name or plan.graph_hash[:12]}, {plan.executor} on {plan.device}"),
        ("budget", budget),
        ("peak", f"{format_bytes(plan.peak)} (without remat {format_bytes(plan.baseline_peak)}"
                 f"{least})"),
        *_predicted(plan),
        _resident(plan),
    ]  # fmt: skip


def _resident(plan: Plan) -> tuple[str, str]:
    size = format_bytes(plan.problem.fixed_bytes)
    if plan.in_step:
        return "beside", f"{size} of that: what else is alive in the step at that moment"
    return "resident", f"{size} of that: parameters, inputs, state"


def _predicted(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where the peak that counts is replayed, what the schedule alone comes to."""
    predicted = format_bytes(plan.predicted)
    if plan.replayed_peak is not None and plan.executor == "eager":
        yield "alone", f"{predicted}: alone it holds what it returns to the end, in the step not"
    elif plan.replayed_peak is not None:
        yield "predicted", f"{predicted} by the schedule; the peak is replayed from what runs"


def _offloaded(plan: Judged) -> Iterator[tuple[str, str]]:
    """What is away between forward and backward, and how fast it may go."""
    if plan.link is not None and plan.offload is not None:
        rate = format_bytes(plan.link.offload_bandwidth)
        yield (
            "offload",
            f"{format_bytes(plan.offloaded_bytes)} to {plan.offload}, at {rate} a second",
        )


def _places(plan: Judged) -> Iterator[tuple[str, str]]:
    """Where the peak is, and where it was without remat."""
    from remat.plans import op_at

    now = _peak_op(plan.problem, plan.solution)
    before = op_at(plan.problem, plan.baseline, plan.baseline_timeline.peak_step)
    yield from _place_rows("peak is at", now)
    if before is now:
        yield "it was at", "the same op"
    else:
        yield from _place_rows("it was at", before)


def _place_rows(name: str, op: Op | None) -> Iterator[tuple[str, str]]:
    if op is None:
        yield name, _place(op)
        return
    yield name, f"{op.target or op.name}, {op.phase}"
    if op.layer or op.source:
        yield "", cut_left(", ".join(part for part in (op.layer, op.source) if part), WIDTH - 11)


def _gap(solution: Solution) -> str:
    by = f"{solution.solver}, {format_seconds(solution.solve_time)}"
    if solution.status == "optimal":
        return f"none: no plan of its kind is faster ({by})"
    if not solution.fits:
        return f"{solution.status}: no plan within the budget ({by})"
    return f"a better plan could be faster by {100 * solution.gap:.2f} % at most ({by})"


def _phases(phases: Iterable[PhaseRow]) -> list[str]:
    lines = [f"{'phase':<12}{'time':>21}{'FLOPs':>23}{'peak':>24}"]
    for row in phases:
        time = f"{format_seconds(row.baseline_seconds)} → {format_seconds(row.seconds)}"
        flops = f"{_flops(row.baseline_flops)} → {_flops(row.flops)}"
        peak = f"{format_bytes(row.baseline_peak)} → {format_bytes(row.peak)}"
        lines.append(f"{row.phase:<12}{time:>21}{flops:>23}{peak:>24}")
    return lines


def _layers(rows: Sequence[LayerRow], several_calls: bool = False) -> list[str]:
    if not rows:
        return []
    rows = _fold(rows, several_calls)
    longest = max(map(_bulk, rows))
    legend = "█ kept ▒ away ░" if any(row.offloaded_bytes for row in rows) else "█ kept ░ not"
    head = (
        f"{'layer':<{_LAYER_WIDTH}} {legend:<{_BAR_WIDTH}}{'unasked':>10}{'kept':>11}{'extra':>11}"
    )
    lines = [head]
    for row in rows:
        lines.append(
            f"{cut_left(_named(row.layer), _LAYER_WIDTH):<{_LAYER_WIDTH}} "
            f"{_bar(row, longest):<{_BAR_WIDTH}}"
            f"{format_bytes(row.baseline_bytes):>10}{format_bytes(row.kept_bytes):>11}"
            f"{_more_seconds(row.extra_seconds):>11}"
        )
    return lines


def _fold(rows: Sequence[LayerRow], several_calls: bool = False) -> list[LayerRow]:
    """At most ``LAYER_ROWS`` rows: modules joined by block, then all but the largest summed."""
    folded = _joined(rows, [block(row.layer, several_calls=several_calls) for row in rows])
    if len(folded) <= LAYER_ROWS:
        return folded
    largest = {row.layer for row in sorted(folded, key=lambda row: -_bulk(row))[: LAYER_ROWS - 1]}
    rest = f"{len(folded) - len(largest)} other layers"
    return sorted(
        _joined(folded, [row.layer if row.layer in largest else rest for row in folded]),
        key=lambda row: row.layer == rest,
    )


def _bulk(row: LayerRow) -> int:
    """The longer bar. A plan may keep what the baseline drops, because recomputing reads it."""
    return max(row.baseline_bytes, row.kept_bytes + row.offloaded_bytes)


def _joined(rows: Sequence[LayerRow], names: Sequence[str]) -> list[LayerRow]:
    together: dict[str, list[LayerRow]] = {}
    for row, name in zip(rows, names, strict=True):
        together.setdefault(name, []).append(row)
    figures = [field.name for field in fields(rows[0])][1:]
    return [
        type(rows[0])(name, *(sum(getattr(row, figure) for row in part) for figure in figures))
        for name, part in together.items()
    ]


def _bar(row: LayerRow, longest: int) -> str:
    if longest == 0:
        return ""
    ends = (row.kept_bytes, row.kept_bytes + row.offloaded_bytes, _bulk(row))
    kept, away, all_of_it = (round(_BAR_WIDTH * end / longest) for end in ends)
    return "█" * kept + "▒" * (away - kept) + "░" * (all_of_it - away)


def _decisions(rows: Sequence[DecisionRow]) -> list[str]:
    if not rows:
        return []
    lines = [f"the {min(DECISION_ROWS, len(rows))} largest of {len(rows)} decisions"]
    for row in sorted(rows, key=lambda row: -row.bytes)[:DECISION_ROWS]:
        cost, name = _more_seconds(row.seconds), cut_right(row.value, 14)
        head = f"{row.action:<10}{format_bytes(row.bytes):>10}{cost:>11}  {name:<15}"
        source = cut_left(file_and_line(row.source), 21)
        layer = cut_left(_named(row.layer), WIDTH - len(head) - len(source) - 1)
        lines.append(f"{head}{layer} {source}")
    return lines


def _notes(notes: Sequence[str]) -> list[str]:
    lines = []
    for note in notes[:NOTE_ROWS]:
        lines += textwrap.wrap(
            f"note: {note}", WIDTH, subsequent_indent="      ", max_lines=3, placeholder=" …"
        )
    if len(notes) > NOTE_ROWS:
        lines.append(f"and {len(notes) - NOTE_ROWS} more notes (plan.notes)")
    return lines


def budget_too_small(problem: Problem, solution: Solution, memory_budget: int) -> BudgetTooSmall:
    """The error for a budget nothing fits in, in words.

    Args:
        solution: the answer for that budget; its schedule is the plan with the least peak found.
        memory_budget: what was asked for, in bytes.
    """
    least, proven = solution.peak, solution.peak_lower_bound
    message = [
        f"memory_budget {format_bytes(memory_budget)} ({memory_budget} bytes) is too small.",
        *_which_bound(solution, memory_budget),
        f"That peak is at {_place(_peak_op(problem, solution))}, with these alive:",
        *(f"  {format_bytes(size):>10}  {what}" for size, what in _alive(problem, solution)),
    ]
    if memory_budget < proven and solution.floor_op >= 0:
        message.append(f"What proves it is {_place(problem.ops[solution.floor_op])}.")
    message.append(_what_would_help(problem, least, memory_budget))
    return BudgetTooSmall(
        "\n".join(message),
        memory_budget=memory_budget,
        least_peak=least,
        peak_lower_bound=proven,
    )


def _which_bound(solution: Solution, memory_budget: int) -> Iterator[str]:
    least, proven = solution.peak, solution.peak_lower_bound
    yield f"The least peak a plan was found for is {format_bytes(least)} ({least} bytes)."
    if memory_budget < proven:
        yield f"It is proven that no plan peaks below {format_bytes(proven)} ({proven} bytes)."
    else:
        yield (
            f"Only below {format_bytes(proven)} ({proven} bytes) is it proven that there is none: "
            "a longer time_limit may find one."
        )


def _alive(problem: Problem, solution: Solution) -> list[tuple[int, str]]:
    """(bytes, what) alive at the peak, largest first; the small ones in one row."""
    held = []
    for value in solution.timeline.alive_at_peak:
        producer = problem.producer[value]
        name, size = problem.values[value].name, problem.values[value].bytes
        if problem.values[value].owned:  # already among the resident bytes
            continue
        made_by = f" of {_place(problem.ops[producer])}" if producer >= 0 else " (from outside)"
        held.append((size, name + made_by))
    op = _peak_op(problem, solution)
    if op is not None and op.workspace:
        held.append((op.workspace, f"workspace of {op.target or op.name}"))
    held.sort(key=lambda row: -row[0])
    shown, rest = held[:ALIVE_ROWS], held[ALIVE_ROWS:]
    if rest:
        shown.append((sum(size for size, _ in rest), f"{len(rest)} smaller values"))
    if problem.fixed_bytes:
        shown.append((problem.fixed_bytes, "parameters, inputs and other resident bytes"))
    return shown


def _what_would_help(problem: Problem, least: int, memory_budget: int) -> str:
    if problem.fixed_bytes >= memory_budget:
        return (
            f"Resident bytes alone take {format_bytes(problem.fixed_bytes)}, which no plan can "
            "change: use a smaller model or dtype, or shard the parameters."
        )
    return (
        f"What would help: memory_budget={least} (or 0.0, the least there is); a smaller batch, "
        "with gradients accumulated over several calls; shorter sequences or smaller images"
        f"{_offloading(problem, memory_budget)}."
    )


def _offloading(problem: Problem, memory_budget: int) -> str:
    """That offloading could do it, if it could."""
    from remat.solvers.offload import least_peak_with_offload  # with a solver, half a second

    peak = least_peak_with_offload(problem)
    if peak > memory_budget:
        return ""
    return f"; offload= (a directory), with which {format_bytes(peak)} could be reached"


def peak_place(
    problem: Problem, schedule: Schedule, timeline: Timeline, *, short: bool = False
) -> str:
    """Where a schedule peaks: ``aten.gelu in transformer.h.3.mlp (model.py:42), backward``."""
    from remat.plans import op_at

    op = op_at(problem, schedule, timeline.peak_step)
    if op is not None and short:
        op = replace(
            op,
            target=(op.target or op.name).removesuffix(".default"),
            source=file_and_line(op.source),
        )
    return _place(op)


def _peak_op(problem: Problem, solution: Solution) -> Op | None:
    from remat.plans import op_at

    return op_at(problem, solution.schedule, solution.timeline.peak_step)


def _place(op: Op | None) -> str:
    """``aten.gelu in transformer.h.3.mlp (model.py:42), backward``."""
    if op is None:
        return "the start, where only resident bytes are there"
    layer = f" in {op.layer}" if op.layer else ""
    source = f" ({op.source})" if op.source else ""
    return f"{op.target or op.name}{layer}{source}, {op.phase}"


def _named(layer: str) -> str:
    return layer or "(no module)"


def _more_seconds(seconds: float) -> str:
    return f"+{format_seconds(seconds)}" if seconds > 0 else ""


def _flops(count: int) -> str:
    """Decimal units, as everybody counts them: ``1.20 T``, ``411.4 G``."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            scaled = count / unit
            return f"{scaled:.2f} {name}" if scaled < 10 else f"{scaled:.1f} {name}"
    return str(count)
