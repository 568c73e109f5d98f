"""Two plans side by side: what changed, and why. ``remat compare``, ``remat.compare``.

*Why* is what was asked or given differently: the budget, the code, torch, the device, the costs.
*What* is what came of it: peak and time, layers, decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from remat.exports import scheduled
from remat.plan_rows import Action, DecisionRow, decision_rows, layer_rows
from remat.plans import Plan
from remat.report.events import Scheduled
from remat.report.names import cut_left
from remat.solvers.problem import Problem
from remat.solvers.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from remat.step_plan import StepPlan

Subject = Literal[
    "kind", "budget", "code", "torch", "device", "executor", "costs", "resident", "solver",
    "patterns", "remat", "offload",
]  # fmt: skip

WIDTH: Final = 80
ROWS: Final = 10
OPS_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that was asked for, or given, differently.

    Attributes:
        subject: what it is about.
        text: both sides of it, for people.
    """

    subject: Subject
    text: str


@dataclass(frozen=True, slots=True)
class Redecided:
    """A value that both plans know and treat differently; sizes in bytes."""

    value: str
    before: Action
    after: Action
    bytes: int
    layer: str
    source: str


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What a layer keeps for backward, in bytes, and spends on recomputation, in seconds."""

    layer: str
    kept_before: int
    kept_after: int
    extra_before: float
    extra_after: float


@dataclass(frozen=True, repr=False)
class Comparison:
    """What changed from one plan to another, and why.

    Attributes:
        before, after: the plans.
        causes: why; empty where nothing was asked for differently.
        redecided: values treated differently, the largest first. Values of different code are the
            same where layer, operator and their place among such ops are.
        layers: that keep or spend something else.
    """

    before: Plan | StepPlan
    after: Plan | StepPlan
    causes: tuple[Cause, ...]
    redecided: tuple[Redecided, ...]
    layers: tuple[LayerChange, ...]

    @property
    def same(self) -> bool:
        """Whether both do the same to every value, at the same peak."""
        return not (self.redecided or self.layers or self.before.peak != self.after.peak)

    def __str__(self) -> str:
        sections = (_why(self), _figures(self), _layer_lines(self), _decision_lines(self))
        return "\n\n".join("\n".join(section) for section in sections if section)


def compare(before: Plan | StepPlan, after: Plan | StepPlan) -> Comparison:
    """Compare two plans, of a graph or of a whole step each.

    The plans may be of different code, devices and versions of torch; what differs is told.
    """
    old, new = scheduled(before), scheduled(after)
    return Comparison(
        before,
        after,
        tuple(_causes(before, after, old, new)),
        _redecided(old, new),
        _layer_changes(old, new),
    )


def _causes(
    before: Plan | StepPlan, after: Plan | StepPlan, old: Scheduled, new: Scheduled
) -> Iterator[Cause]:
    (mine, first), (theirs, second) = _plans(before), _plans(after)
    if mine != theirs:
        yield Cause("kind", f"{mine} → {theirs}")
    if before.memory_budget != after.memory_budget:
        yield Cause("budget", _from_to(before.memory_budget, after.memory_budget))
    hashes = [[plan.graph_hash for plan in plans] for plans in (first, second)]
    if hashes[0] != hashes[1]:
        yield Cause("code", _code(old.problem, new.problem))
    for subject, field in (
        ("torch", "torch_version"), ("device", "device"), ("executor", "executor"),
        ("remat", "remat_version"),
    ):  # fmt: skip
        said = [", ".join(dict.fromkeys(getattr(p, field) for p in q)) for q in (first, second)]
        if said[0] != said[1]:
            yield Cause(subject, " → ".join(said))  # type: ignore[arg-type]
    if mine == theirs and hashes[0] == hashes[1] and (text := _costs(old.problem, new.problem)):
        yield Cause("costs", text)
    resident = [each.problem.fixed_bytes for each in (old, new)]
    if resident[0] != resident[1]:
        yield Cause("resident", f"{_from_to(*resident)}: parameters, inputs, state")
    solvers = [before.solution.solver, after.solution.solver]
    if solvers[0] != solvers[1]:
        yield Cause("solver", " → ".join(solvers))
    offloads = [_offload(plans) for plans in (first, second)]
    if offloads[0] != offloads[1]:
        yield Cause("offload", " → ".join(offloads))
    patterns = [_patterns(plans) for plans in (first, second)]
    if patterns[0] != patterns[1]:
        yield Cause("patterns", " → ".join(patterns))


def _plans(plan: Plan | StepPlan) -> tuple[str, tuple[Plan, ...]]:
    if isinstance(plan, Plan):
        return "one graph", (plan,)
    count = len(plan.plans)
    return f"a step of {count} graph call{'s' * (count != 1)}", plan.plans


def _offload(plans: tuple[Plan, ...]) -> str:
    """Of a step, that of its first call: all of them share one link."""
    link = plans[0].link if plans else None
    if link is None:
        return "none"
    where = plans[0].offload or "somewhere"
    return (
        f"{where} at {format_bytes(link.offload_bandwidth)}/s there and "
        f"{format_bytes(link.reload_bandwidth)}/s back"
    )


def _patterns(plans: tuple[Plan, ...]) -> str:
    said = []
    for name in ("keep", "recompute"):
        if found := dict.fromkeys(x for plan in plans for x in getattr(plan, name)):
            said.append(f"{name} {' '.join(found)}")
    return ", ".join(said) or "none"


def _code(old: Problem, new: Problem) -> str:
    """Which ops only one of two graphs has, or how their sizes differ."""
    ops: list[Counter[tuple[str, str, str]]] = [
        Counter((op.phase, op.layer, op.target) for op in each.ops) for each in (old, new)
    ]
    gone, come = ops[0] - ops[1], ops[1] - ops[0]
    if not gone and not come:
        sizes = [sum(value.bytes for value in each.values) for each in (old, new)]
        if sizes[0] == sizes[1]:
            return "the same ops, otherwise connected, or with other arguments"
        return (
            f"the same ops over tensors of other sizes: {format_bytes(sizes[0])} → "
            f"{format_bytes(sizes[1])} in all"
        )
    parts = []
    for found, word in ((gone, "gone"), (come, "new")):
        if found:
            parts.append(f"{found.total()} ops {word} ({_named_ops(found)})")
    return ", ".join(parts)


def _named_ops(found: Counter[tuple[str, str, str]]) -> str:
    by_target: Counter[str] = Counter()
    layers: dict[str, set[str]] = {}
    for (_, layer, target), count in found.items():
        by_target[target] += count
        layers.setdefault(target, set()).add(layer)
    said = []
    for target, count in by_target.most_common(OPS_NAMED):
        where = sorted(layer for layer in layers[target] if layer)
        place = f" in {where[0]}{' and others' if len(where) > 1 else ''}" if where else ""
        said.append(f"{count} {target}{place}")
    more = len(by_target) - len(said)
    return ", ".join(said) + (f", {more} other kinds" if more else "")


def _costs(old: Problem, new: Problem) -> str:
    """How the same ops are priced differently."""
    seconds = [each.base_seconds for each in (old, new)]
    times = f"{format_seconds(seconds[0])} → {format_seconds(seconds[1])} for every op once"
    if old.cost != new.cost:
        return f"{old.cost or 'unknown'} → {new.cost or 'unknown'}: {times}"
    pairs = list(zip(old.ops, new.ops, strict=False))
    if any(a.workspace != b.workspace for a, b in pairs):
        return f"other workspaces; {times}"
    if any(a.seconds != b.seconds for a, b in pairs):
        return f"measured again: {times}"
    return ""


def _redecided(old: Scheduled, new: Scheduled) -> tuple[Redecided, ...]:
    rows = [_rows(each) for each in (old, new)]
    same_code = rows[0].keys() == rows[1].keys()
    if not same_code:
        rows = [_by_place(each, given) for each, given in zip((old, new), rows, strict=True)]
    found = [
        Redecided(row.value, rows[0][key].action, row.action, row.bytes, row.layer, row.source)
        for key, row in rows[1].items()
        if key in rows[0] and rows[0][key].action != row.action
    ]
    return tuple(sorted(found, key=lambda row: -row.bytes))


def _rows(plan: Scheduled) -> dict[str, DecisionRow]:
    return decision_rows(plan.problem, plan.schedule)


def _by_place(plan: Scheduled, rows: dict[str, DecisionRow]) -> dict[str, DecisionRow]:
    """By layer, operator and place among such: names of nodes move when code is edited."""
    found: dict[str, DecisionRow] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for index, value in enumerate(plan.problem.values):
        producer = plan.problem.producer[index]
        if producer < 0:
            continue
        op = plan.problem.ops[producer]
        if op.phase == "backward":
            continue
        seen[op.layer, op.target] += 1
        if value.name in rows:
            found[f"{op.layer} {op.target} {seen[op.layer, op.target]}"] = rows[value.name]
    return found


def _layer_changes(old: Scheduled, new: Scheduled) -> tuple[LayerChange, ...]:
    rows = [
        {row.layer: row for row in layer_rows(each.problem, each.schedule, each.baseline)}
        for each in (old, new)
    ]
    changed = []
    for layer in dict.fromkeys([*rows[0], *rows[1]]):
        kept = [rows[k][layer].kept_bytes if layer in rows[k] else 0 for k in (0, 1)]
        extra = [rows[k][layer].extra_seconds if layer in rows[k] else 0.0 for k in (0, 1)]
        if kept[0] != kept[1] or extra[0] != extra[1]:
            changed.append(LayerChange(layer, kept[0], kept[1], extra[0], extra[1]))
    return tuple(changed)


def _why(found: Comparison) -> list[str]:
    if found.causes:
        return [f"{cause.subject:<11}{cause.text}" for cause in found.causes]
    if found.same:
        return ["the plans are the same"]
    return [
        "nothing was asked for differently: the solver stopped at another plan",
        "(a longer time_limit, or a smaller gap, makes two runs alike)",
    ]


def _figures(found: Comparison) -> list[str]:
    old, new = found.before, found.after
    seconds = [plan.solution.seconds for plan in (old, new)]
    rows = [
        ("peak", format_bytes(old.peak), format_bytes(new.peak), _change(old.peak, new.peak)),
        ("without remat", format_bytes(old.baseline_peak), format_bytes(new.baseline_peak),
         _change(old.baseline_peak, new.baseline_peak)),
        ("least peak", _bytes_or_none(old.least_peak), _bytes_or_none(new.least_peak), ""),
        ("time", *map(format_seconds, seconds), _change(*seconds)),
        ("extra time", format_share(old.extra_time), format_share(new.extra_time), ""),
    ]  # fmt: skip
    lines = [f"{'':<16}{'before':>14}{'after':>14}{'change':>12}"]
    lines += [f"{a:<16}{b:>14}{c:>14}{d:>12}".rstrip() for a, b, c, d in rows]
    return lines


def _layer_lines(found: Comparison) -> list[str]:
    if not found.layers:
        return []
    rows = sorted(found.layers, key=lambda row: -abs(row.kept_after - row.kept_before))
    lines = [f"{'layer':<30}{'kept before':>13}{'after':>12}{'extra before':>13}{'after':>12}"]
    for row in rows[:ROWS]:
        lines.append(
            f"{cut_left(row.layer or '(no layer)', 30):<30}"
            f"{format_bytes(row.kept_before):>13}{format_bytes(row.kept_after):>12}"
            f"{format_seconds(row.extra_before):>13}{format_seconds(row.extra_after):>12}"
        )
    return [*lines, *_more(len(rows), "layers")]


def _decision_lines(found: Comparison) -> list[str]:
    rows = found.redecided
    if not rows:
        return []
    lines = [f"{len(rows)} values treated differently, the largest first"]
    for row in rows[:ROWS]:
        head = f"{row.before} → {row.after:<10}{format_bytes(row.bytes):>11}  {row.value[:24]} "
        where = " ".join(part for part in (row.layer, row.source) if part)
        lines.append(f"{head}{cut_left(where, WIDTH - len(head))}")
    return [*lines, *_more(len(rows), "values")]


def _more(count: int, what: str) -> list[str]:
    return [f"and {count - ROWS} more {what}"] if count > ROWS else []


def _change(old: float, new: float) -> str:
    return format_share(new / old - 1) if old > 0 else ""


def _from_to(old: int | None, new: int | None) -> str:
    """Both, to the byte where they would look alike."""
    texts = [_bytes_or_none(old), _bytes_or_none(new)]
    return " → ".join(texts if texts[0] != texts[1] else [f"{old} bytes", f"{new} bytes"])


def _bytes_or_none(count: int | None) -> str:
    return "none" if count is None else format_bytes(count)
