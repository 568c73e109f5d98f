"""A plan as a graph in Graphviz's language: who makes what, who reads it, and what becomes of it.

``dot -Tsvg plan.dot -o plan.svg`` draws it. Green is kept for backward, orange is computed again,
blue is offloaded; grey is what backward does not read. Large graphs are drawn by layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final, Literal

from remat.report.events import Scheduled
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Problem
from remat.solvers.schedule import Decision, decisions
from remat.solvers.units import format_bytes, format_seconds

Detail = Literal["ops", "layers"]

MOST_OPS: Final = 400
"""Ops that Graphviz lays out in seconds; it needs minutes for a few thousand."""

_COLOURS: Final = {
    Decision.KEEP: "#a8d5a2",
    Decision.RECOMPUTE: "#f6c08b",
    Decision.OFFLOAD: "#9cc4ec",
    None: "#e4e4e4",
}
_WORDS: Final = {
    Decision.KEEP: "keeps",
    Decision.RECOMPUTE: "does not keep",
    Decision.OFFLOAD: "offloads",
}
_HEAD: Final = """digraph plan {
  rankdir=TB; fontname="Helvetica"; labelloc=t;
  node [shape=box, style=filled, fontname="Helvetica", fontsize=10];
  edge [fontname="Helvetica", fontsize=9, color="#666666"];
"""


def graphviz_text(plan: Scheduled, detail: Detail | None = None) -> str:
    """The graph as text.

    Args:
        detail: ``"ops"``, a node for each op, or ``"layers"``, one for each layer and phase; None:
            ops, where there are at most ``MOST_OPS``.

    Raises:
        InvalidOption: another detail.
    """
    if detail not in (None, "ops", "layers"):
        raise InvalidOption(f'detail={detail!r}; it must be "ops" or "layers"')
    if detail is None:
        detail = "ops" if len(plan.problem.ops) <= MOST_OPS else "layers"
    title = f"{plan.title}: peak {format_bytes(plan.timeline.peak)}"
    drawn = _by_op(plan) if detail == "ops" else _by_layer(plan)
    return f"{_HEAD}  label={_quoted(title)};\n" + "\n".join(drawn) + "\n}\n"


def _by_op(plan: Scheduled) -> Iterator[str]:
    problem = plan.problem
    decided, runs = decisions(problem, plan.schedule), Counter(plan.schedule.computes)
    layers: dict[str, list[int]] = {}
    for index, op in enumerate(problem.ops):
        layers.setdefault(op.layer, []).append(index)
    for number, (layer, ops) in enumerate(layers.items()):
        if layer:
            yield f'  subgraph cluster_{number} {{ label={_quoted(layer)}; color="#bbbbbb";'
        for index in ops:
            yield _op_node(problem, index, runs[index], decided)
        if layer:
            yield "  }"
    for reader, op in enumerate(problem.ops):
        for value in op.reads:
            maker, held = problem.producer[value], problem.values[value]
            if maker >= 0:
                label = _quoted(f"{held.name}\n{format_bytes(held.bytes)}")
                yield f"  op{maker} -> op{reader} [label={label}];"


def _op_node(problem: Problem, index: int, runs: int, decided: dict[int, Decision]) -> str:
    op = problem.ops[index]
    found = [decided[v] for v in op.writes if v in decided]
    colour = _COLOURS[max(found, key=lambda d: d is not Decision.KEEP) if found else None]
    lines = [op.target or op.name, op.source, format_seconds(op.seconds)]
    if runs > 1:
        lines.append(f"runs {runs} times")
    shape = "" if op.phase != "backward" else ", shape=ellipse"
    label = _quoted("\n".join(line for line in lines if line))
    return f'  op{index} [label={label}, fillcolor="{colour}"{shape}];'


def _by_layer(plan: Scheduled) -> Iterator[str]:
    problem = plan.problem
    decided, runs = decisions(problem, plan.schedule), Counter(plan.schedule.computes)
    names: dict[tuple[str, str], int] = {}
    fates: defaultdict[int, Counter[Decision]] = defaultdict(Counter)
    again: Counter[int] = Counter()
    node_of = []
    for index, op in enumerate(problem.ops):
        node = names.setdefault((op.phase, op.layer), len(names))
        node_of.append(node)
        again[node] += max(0, runs[index] - 1)
        for value in op.writes:
            if value in decided:
                fates[node][decided[value]] += problem.values[value].bytes
    for (phase, layer), node in names.items():
        lines = [layer or "(no layer)", phase]
        fate = fates[node]
        lines += [f"{_WORDS[d]} {format_bytes(fate[d])}" for d in Decision if fate[d]]
        lines += [f"{again[node]} ops run again"] if again[node] else []
        colour = _COLOURS[max(Decision, key=lambda d: fate[d]) if fate.total() else None]
        shape = "" if phase != "backward" else ", shape=ellipse"
        yield f'  n{node} [label={_quoted(chr(10).join(lines))}, fillcolor="{colour}"{shape}];'
    flows: Counter[tuple[int, int]] = Counter()
    for index, op in enumerate(problem.ops):
        for value in op.reads:
            maker = problem.producer[value]
            if maker >= 0 and node_of[maker] != node_of[index]:
                flows[node_of[maker], node_of[index]] += problem.values[value].bytes
    for (source, target), size in flows.items():
        yield f"  n{source} -> n{target} [label={_quoted(format_bytes(size))}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
