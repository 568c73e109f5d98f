"""A plan as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

Two processes: the plan, and the same step without remat. Each has a counter of the bytes in use and
a track of slices that nest: phase, layer, op. Transfers have tracks of their own.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from remat.report.events import Scheduled, Slice, slices
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Timeline

_STEPS, _OFFLOAD, _RELOAD = 1, 2, 3
_TRACKS: Final = {_STEPS: "ops", _OFFLOAD: "offload", _RELOAD: "reload"}
_WITHOUT_TIMES: Final = 1e-6
"""Seconds an op is drawn with in a plan whose ops all take none."""


def chrome_text(plan: Scheduled) -> str:
    """The trace as JSON text, one event a line."""
    trace = chrome_trace(plan)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in trace.pop("traceEvents"))
    rest = json.dumps(trace, allow_nan=False)
    return f'{rest[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def chrome_trace(plan: Scheduled) -> dict[str, Any]:
    """The trace as plain data; times in microseconds, counters in bytes."""
    drawn = _Drawn(plan.problem, plan.schedule, plan.timeline, plan.link)
    plain = _Drawn(plan.problem, plan.baseline, plan.baseline_timeline, None)
    events = [*_process(1, plan.title, drawn), *_process(2, "without remat", plain)]
    said = {"title": plan.title, "peak_bytes": plan.timeline.peak}
    if plan.memory_budget is not None:
        said["memory_budget_bytes"] = plan.memory_budget
    if plan.code_peak is not None:
        said["peak_bytes_of_generated_code"] = plan.code_peak
    if not any(op.seconds for op in plan.problem.ops):
        said["times"] = "the plan has none: every op is drawn as one microsecond"
    return {"displayTimeUnit": "ms", "otherData": said, "traceEvents": events}


@dataclass(frozen=True)
class _Drawn:
    problem: Problem
    schedule: Schedule
    timeline: Timeline
    link: Link | None

    def slices(self) -> list[Slice]:
        found = list(slices(self.problem, self.schedule, self.link))
        if any(op.seconds for op in self.problem.ops):
            return found
        return [
            Slice(s.step, s.kind, s.index, k * _WITHOUT_TIMES, (k + 1) * _WITHOUT_TIMES,
                  s.again, s.backward)
            for k, s in enumerate(found)
        ]  # fmt: skip


def _process(process: int, title: str, drawn: _Drawn) -> Iterator[dict[str, Any]]:
    found = drawn.slices()
    computes = [s for s in found if s.kind == "compute"]
    transfers = [s for s in found if s.kind != "compute"]
    yield _named("process_name", process, 0, title)
    yield _named("process_sort_index", process, 0, process)
    for track, name in _TRACKS.items():
        if track == _STEPS or transfers:
            yield _named("thread_name", process, track, name)
    yield from _counter(process, drawn, computes)
    yield from _nested(process, drawn, computes)
    for s in transfers:
        value = drawn.problem.values[s.index]
        track = _OFFLOAD if s.kind == "offload" else _RELOAD
        arguments = {"bytes": value.bytes, "step": s.step}
        yield _slice(process, track, f"{s.kind} {value.name}", s.begin, s.end, arguments)


def _counter(process: int, drawn: _Drawn, computes: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Bytes in use: one sample when an op begins, one when what is freed after it is gone.

    Samples are a nanosecond apart at least: of two at one moment only the last is drawn, and what
    code outside the graphs holds, which takes no time in a plan, is often the peak.
    """
    latest = -1
    for seconds, used in _levels(drawn, computes):
        latest = max(latest + 1, round(1e9 * seconds))
        yield _sample(process, latest, used)


def _levels(drawn: _Drawn, computes: Sequence[Slice]) -> Iterator[tuple[float, int]]:
    used = drawn.timeline.bytes
    yield 0.0, drawn.problem.fixed_bytes
    for s, after in zip(computes, [*computes[1:], None], strict=True):
        yield s.begin, used[s.step]
        last = (after.step if after is not None else len(used)) - 1
        if last > s.step:
            yield s.end, used[last]


def _nested(process: int, drawn: _Drawn, computes: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Phases around layers around ops: a slice is written before those inside it."""
    for phase, inside in _runs(computes, lambda s: "backward" if s.backward else "forward"):
        yield _slice(process, _STEPS, phase, inside[0].begin, inside[-1].end, {})
        for layer, ops in _runs(inside, lambda s: drawn.problem.ops[s.index].layer):
            if layer:
                yield _slice(process, _STEPS, layer, ops[0].begin, ops[-1].end, {})
            for s in ops:
                yield _op_slice(process, drawn, s)


def _op_slice(process: int, drawn: _Drawn, s: Slice) -> dict[str, Any]:
    op, values = drawn.problem.ops[s.index], drawn.problem.values
    arguments = {
        "op": op.name,
        "layer": op.layer,
        "source": op.source,
        "writes": {values[v].name: values[v].bytes for v in op.writes},
        "workspace_bytes": op.workspace,
        "flops": op.flops,
        "bytes_in_use": drawn.timeline.bytes[s.step],
        "step": s.step,
        "again": s.again,
    }
    name = f"{op.target or op.name}{' (again)' if s.again else ''}"
    return _slice(process, _STEPS, name, s.begin, s.end, arguments)


def _runs(items: Iterable[Slice], key: Any) -> Iterator[tuple[str, list[Slice]]]:
    """Neighbours with the same key, together."""
    together: list[Slice] = []
    for item in items:
        if together and key(item) != key(together[0]):
            yield key(together[0]), together
            together = []
        together.append(item)
    if together:
        yield key(together[0]), together


def _slice(
    process: int, track: int, name: str, begin: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    # Whole nanoseconds, so that a slice never ends a rounding error after the one around it.
    first, last = round(1e9 * begin), round(1e9 * end)
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "cat": "remat",
        "ts": first / 1000, "dur": (last - first) / 1000, "args": arguments,
    }  # fmt: skip


def _sample(process: int, nanoseconds: int, used: int) -> dict[str, Any]:
    return {
        "ph": "C", "pid": process, "tid": 0, "name": "bytes in use",
        "ts": nanoseconds / 1000, "args": {"bytes": used},
    }  # fmt: skip


def _named(what: str, process: int, track: int, name: str | int) -> dict[str, Any]:
    argument = "sort_index" if what == "process_sort_index" else "name"
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": {argument: name}}
