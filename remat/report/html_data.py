"""What the page is given: the problem, both schedules and the decisions, as compact JSON.

Names are stored once and then meant by their index; a step is one number, ``5 × index + kind``.
Bytes over time are not stored: the page runs both schedules through its own copy of the judge
(``page/judge.js``), and says so if it finds another peak than the plan's.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from remat.plan_rows import layer_rows, runs_again
from remat.report.names import block
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Decision, Schedule, Solution, Timeline, decisions

KINDS: Final = ("compute", "free", "offload", "reload", "wait")
PHASES: Final = ("forward", "deferred", "backward")
ACTIONS: Final = (Decision.KEEP, Decision.RECOMPUTE, Decision.OFFLOAD)
SEEN: Final = 0.01  # of all bytes
GROUPS: Final = 12  # as many colours as can be told apart when they lie in order
OTHER: Final = "other layers"
NO_MODULE: Final = "(no module)"


@dataclass(frozen=True)
class Subject:
    """What a page is about: the plan of one graph, or of a whole step.

    Attributes:
        title: what was planned, for people.
        facts: (name, text) for the line under the title.
        problem, solution, baseline: as in a plan.
        baseline_timeline: the judge's account of the baseline.
        memory_budget, peak, replayed_peak, least_peak: bytes, as in a plan.
        extra_time, extra_flops: over the baseline's; 0.08 is 8 % more.
        notes: for people.
        text: the plan as printed.
        marks: (op, label) where a part of the step begins; none for the one graph of a plan.
        link: where offloaded values go.
        several_calls: layers begin with the name of their call, ``call.0``.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    problem: Problem
    solution: Solution
    baseline: Schedule
    baseline_timeline: Timeline
    memory_budget: int | None
    peak: int
    replayed_peak: int | None
    least_peak: int | None
    extra_time: float
    extra_flops: float
    notes: tuple[str, ...]
    text: str
    marks: tuple[tuple[int, str], ...] = ()
    link: Link | None = None
    several_calls: bool = False


def page_data(subject: Subject) -> str:
    """JSON that is safe inside a ``<script>`` element, whatever a layer or a file is called."""
    text = json.dumps(_data(subject), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # "</script>" and "<!--" would end the element; both line separators once ended a JS string.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(subject: Subject) -> dict[str, Any]:
    problem, schedule = subject.problem, subject.solution.schedule
    names = _Names()
    ops = _ops(problem, names)
    layers = list(dict.fromkeys(op.layer for op in problem.ops))
    weights: Counter[str] = Counter()
    for op in problem.ops:
        weights[op.layer] += sum(problem.values[v].bytes for v in op.writes)
    calls, link = subject.several_calls, subject.link
    labels, group_of = groups(layers, weights, calls)
    return {
        "fixed": problem.fixed_bytes,
        "budget": subject.memory_budget,
        "peak": subject.peak,
        "predicted": subject.solution.peak,
        "baseline": subject.baseline_timeline.peak,
        "replayed": subject.replayed_peak,
        "flops": [subject.baseline_timeline.flops, subject.solution.timeline.flops],
        "values": _values(problem),
        "ops": ops,
        "before": _steps(subject.baseline),
        "after": _steps(schedule),
        "decisions": _decisions(problem, schedule),
        "layers": [names.of(layer) for layer in layers],
        "blocks": [names.of(block(layer, several_calls=calls) or NO_MODULE) for layer in layers],
        "groupOf": group_of,
        "groups": labels,
        "rows": [
            [names.of(row.layer), row.baseline_bytes, row.kept_bytes, row.recomputed_bytes,
             row.offloaded_bytes, row.extra_seconds]
            for row in layer_rows(problem, schedule, subject.baseline)
        ],
        "marks": list(subject.marks),
        "link": None if link is None else _finite(link),
        "names": names.all,
    }  # fmt: skip


def _finite(link: Link) -> list[float]:
    """Bandwidths and latency; JSON has no infinity, and 0 cannot be meant."""
    ways = (link.offload_bandwidth, link.reload_bandwidth)
    return [*(0.0 if math.isinf(way) else way for way in ways), link.latency]


@dataclass
class _Names:
    all: list[str] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """The index of a name, which is new or not."""
        if name not in self.known:
            self.known[name] = len(self.all)
            self.all.append(name)
        return self.known[name]


def _values(problem: Problem) -> dict[str, list[Any]]:
    flags = [
        held.owned + 2 * held.tangent + 4 * (held.output is not None)
        + 8 * (held.output == "forward") + 16 * (not held.keepable)
        for held in problem.values
    ]  # fmt: skip
    return {
        "name": [held.name for held in problem.values],
        "bytes": [held.bytes for held in problem.values],
        "flags": flags,
    }


def _ops(problem: Problem, names: _Names) -> dict[str, list[Any]]:
    ops = problem.ops
    return {
        "name": [op.name for op in ops],
        "target": [names.of(op.target or op.name) for op in ops],
        "layer": [names.of(op.layer) for op in ops],
        "source": [names.of(op.source) for op in ops],
        "phase": [PHASES.index(op.phase) for op in ops],
        "seconds": [_number(op.seconds) for op in ops],
        "flops": [op.flops for op in ops],
        "workspace": [op.workspace for op in ops],
        "once": [int(not op.rerunnable) for op in ops],
        "reads": [list(op.reads) for op in ops],
        "writes": [list(op.writes) for op in ops],
    }


def _number(seconds: float) -> float | int:
    return 0 if seconds == 0 else seconds


def _steps(schedule: Schedule) -> list[int]:
    return [len(KINDS) * step.index + KINDS.index(step.kind) for step in schedule.steps]


def _decisions(problem: Problem, schedule: Schedule) -> list[list[float]]:
    """[value, action, seconds of running its op again], in program order."""
    again = runs_again(schedule)
    return [
        [value, ACTIONS.index(action),
         _number(again[problem.producer[value]] * problem.ops[problem.producer[value]].seconds)]
        for value, action in decisions(problem, schedule).items()
    ]  # fmt: skip


def groups(
    layers: Sequence[str], weights: Mapping[str, int], calls: bool = False
) -> tuple[list[str], list[int]]:
    """At most ``GROUPS`` names, in program order, and for each layer the index of its own.

    Members of one list are joined with their neighbours (``h.0–3``) until there are few enough,
    after what is too small to be seen has been put together.

    Args:
        weights: bytes each layer makes.
        calls: the layers are those of several calls: see :func:`remat.report.names.block`.
    """
    own = [block(layer, several_calls=calls) for layer in layers]
    blocks = list(dict.fromkeys(own))
    name_of = dict(zip(blocks, blocks, strict=True))
    if len(blocks) > GROUPS:
        weight_of: Counter[str] = Counter()
        for layer, name in zip(layers, own, strict=True):
            weight_of[name] += weights[layer]
        name_of = _joined(blocks, weight_of)
    labels = list(dict.fromkeys(name_of[name] or NO_MODULE for name in blocks))
    labels.sort(key=lambda label: label == OTHER)
    index = {label: at for at, label in enumerate(labels)}
    of = [index[name_of[name] or NO_MODULE] for name in own]
    return _without_common_prefix(labels), of


def _without_common_prefix(labels: Sequence[str]) -> list[str]:
    """``h.0`` and ``ln_f`` for ``model.h.0`` and ``model.ln_f``."""
    paths = [label.split(".") for label in labels if label not in (OTHER, NO_MODULE)]
    shared = 0
    while len(paths) > 1 and len({path[shared] for path in paths if len(path) > shared + 1}) == 1:
        if any(len(path) <= shared + 1 for path in paths):
            break
        shared += 1
    if any(path[shared].isdigit() for path in paths):
        shared = max(0, shared - 1)  # a bare number says nothing
    return [
        label if label in (OTHER, NO_MODULE) else ".".join(label.split(".")[shared:])
        for label in labels
    ]


def _joined(blocks: Sequence[str], weights: Counter[str]) -> dict[str, str]:
    lists: dict[str, list[str]] = {}
    for name in blocks:
        match = re.fullmatch(r"(?:(.*)\.)?\d+", name)
        lists.setdefault((match[1] or "") + "." if match else name, []).append(name)
    weight_of = {key: sum(weights[name] for name in names) for key, names in lists.items()}
    seen = [key for key in lists if weight_of[key] > SEEN * weights.total()]
    largest = sorted(seen, key=lambda key: -weight_of[key])[: GROUPS - 1]
    room = GROUPS - 1 - len(largest)
    members = sum(len(lists[key]) for key in largest if len(lists[key]) > 1)
    name_of: dict[str, str] = {}
    for key, names in lists.items():
        if key not in largest:
            name_of |= dict.fromkeys(names, OTHER)
            continue
        parts = min(len(names), 1 + room * len(names) // max(1, members) * (len(names) > 1))
        for part in _parts(names, parts):
            ends = part[0] if len(part) == 1 else f"{part[0]}–{part[-1].rsplit('.', 1)[-1]}"
            name_of |= dict.fromkeys(part, ends)
    return name_of


def _parts(names: Sequence[str], count: int) -> Iterable[Sequence[str]]:
    """``count`` runs of neighbours, of sizes that differ by one at most."""
    edges = [len(names) * k // count for k in range(count + 1)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]
