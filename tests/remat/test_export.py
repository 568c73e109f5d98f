"""A plan in other tools' formats: levels that are the simulator's, files that those tools read."""

from __future__ import annotations

import dataclasses
import json
import pickle
import pickletools
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import remat
from remat.cli import DONE, FAILED, USAGE, main
from remat.exports import FORMATS, export_text, scheduled
from remat.plans import Plan
from remat.report.chrome import chrome_trace
from remat.report.events import Change, Scheduled, changes, slices
from remat.report.graphviz import graphviz_text
from remat.report.schema import schema_text
from remat.report.snapshot import memory_snapshot
from remat.solvers.errors import InvalidOption
from remat.solvers.keep import keep_everything
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Schedule, Step, with_frees
from remat.solvers.simulate import simulate
from remat.step_plan import StepPlan
from tests.solvers.strategies import problems

Captured = pytest.CaptureFixture[str]


def plan_of(problem: Problem, schedule: Schedule, baseline: Schedule) -> Scheduled:
    return Scheduled(
        "a plan",
        problem,
        schedule,
        simulate(problem, schedule),
        baseline,
        simulate(problem.unrestricted, baseline),
    )


# What is alive.


def highest_levels(found: tuple[Change, ...]) -> dict[int, int]:
    """The highest level within each step."""
    level, highest = 0, defaultdict[int, int](int)
    for change in found:
        level += change.bytes
        highest[change.step] = max(highest[change.step], level)
    return highest


@given(problems(max_forward=6, max_backward=5))
def test_the_levels_of_changes_are_the_simulators(problem: Problem) -> None:
    kept = dataclasses.replace(
        problem,
        ops=tuple(dataclasses.replace(op, workspace=max(0, op.workspace)) for op in problem.ops),
    ).unrestricted
    schedule = keep_everything(kept)
    timeline = simulate(kept, schedule)
    found = changes(kept, schedule, timeline)
    level, highest = kept.fixed_bytes, highest_levels(found)
    for position, step in enumerate(schedule.steps):
        level += sum(change.bytes for change in found if change.step == position)
        if step.kind == "compute":
            assert max(highest[position], level) == timeline.bytes[position]
    assert all(change.bytes for change in found)


def test_an_input_that_is_written_over_is_released_first() -> None:
    problem = Problem(
        (Value("t", 100, tangent=True), Value("g", 100, output="backward")),
        (Op("mul", "backward", (0,), (1,), workspace=-100),),
        fixed_bytes=1,
    )
    schedule = Schedule((Step("compute", 0), Step("free", 0)))
    found = changes(problem, schedule, simulate(problem, schedule))
    assert [(change.name, change.bytes) for change in found[1:]] == [
        ("t", 100), ("t", -100), ("g", 100),
    ]  # fmt: skip
    assert max(highest_levels(found).values()) == simulate(problem, schedule).peak == 101


def test_a_second_copy_and_a_workspace_are_there_while_the_op_runs() -> None:
    problem = Problem(
        (Value("a", 10), Value("b", 20), Value("g", 1, output="backward")),
        (
            Op("f", "forward", (), (0, 1), workspace=5),
            Op("b", "backward", (0, 1), (2,)),
        ),
    )
    schedule = Schedule(
        tuple(Step(*step) for step in [("compute", 0), ("free", 0), ("compute", 0), ("compute", 1)])  # type: ignore[arg-type]
    )
    timeline = simulate(problem, schedule)
    again = [c for c in changes(problem, schedule, timeline) if c.step == 2]
    assert [(c.what, c.bytes) for c in again] == [
        ("value", 10), ("copy", 20), ("workspace", 5), ("workspace", -5), ("copy", -20),
    ]  # fmt: skip
    assert timeline.bytes[2] == 55


def test_slices_follow_the_simulators_clock() -> None:
    problem = Problem(
        (Value("a", 100), Value("g", 1, output="backward")),
        (
            Op("f", "forward", (), (0,), seconds=1.0),
            Op("h", "forward", (), (), seconds=1.0),
            Op("b", "backward", (0,), (1,), seconds=1.0),
        ),
    )
    kinds = [("compute", 0), ("offload", 0), ("compute", 1), ("wait", 0), ("free", 0),
             ("reload", 0), ("wait", 0), ("compute", 2)]  # fmt: skip
    schedule = Schedule(tuple(Step(*kind) for kind in kinds))  # type: ignore[arg-type]
    link = Link(50.0, 100.0, latency=0.5)
    found = list(slices(problem, schedule, link))
    assert [(s.kind, s.begin, s.end) for s in found] == [
        ("compute", 0.0, 1.0), ("offload", 1.0, 3.5), ("compute", 1.0, 2.0),
        ("reload", 3.5, 5.0), ("compute", 5.0, 6.0),
    ]  # fmt: skip
    assert found[-1].end == simulate(problem, schedule, link).seconds


# The memory snapshot.


def peak_of_trace(snapshot: dict[str, Any]) -> int:
    """As the viewer counts: what is allocated and not yet freed, without overlaps."""
    alive: dict[int, int] = {}
    peak = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            first, last = event["addr"], event["addr"] + event["size"]
            assert not any(a < last and first < a + s for a, s in alive.items())
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"]) == event["size"]
        peak = max(peak, sum(alive.values()))
    (segment,) = snapshot["segments"]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    left = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
    assert {block["address"]: block["size"] for block in left} == alive
    return peak


@pytest.mark.parametrize("kind", ["plan", "step_plan"])
def test_a_snapshot_peaks_where_the_plan_does(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    given_plan = request.getfixturevalue(kind)
    remat.export(given_plan, tmp_path / "plan.pickle", to="snapshot")
    raw = (tmp_path / "plan.pickle").read_bytes()
    snapshot = pickle.loads(raw)
    assert peak_of_trace(snapshot) == given_plan.peak
    assert raw[:2] == b"\x80\x04"  # the viewer reads protocols 2 to 4


# The opcodes of the viewer's own unpickler (torch/utils/viz/MemoryViz.js).
READ_BY_THE_VIEWER = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT",
    "BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1",
    "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO",
    "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def test_the_viewer_knows_every_opcode_of_the_pickle(plan: Plan) -> None:
    raw = pickle.dumps(memory_snapshot(scheduled(plan)), protocol=4)
    assert {opcode.name for opcode, _, _ in pickletools.genops(raw)} <= READ_BY_THE_VIEWER


def test_a_snapshot_says_where_a_value_comes_from(plan: Plan) -> None:
    trace = memory_snapshot(scheduled(plan))["device_traces"][0]
    made = [event["frames"] for event in trace if event["action"] == "alloc"]
    assert made[0][0]["name"] == "parameters, inputs and other resident bytes"
    assert made[1] == [
        {"name": "a of mm, forward", "filename": "m.py:10", "line": 0},
        {"name": "blocks.0", "filename": "module", "line": 0},
    ]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)
    assert times[-1] == 9e6  # the last op begins then; it takes two seconds


def test_torch_reads_the_snapshot(plan: Plan) -> None:
    from torch.cuda import _memory_viz

    snapshot = memory_snapshot(scheduled(plan))
    assert "blocks.0" in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert _memory_viz.segsum(snapshot)
    assert "MemoryViz.js" in _memory_viz.trace_plot(snapshot)


def test_a_source_line_becomes_a_frame(plan: Plan) -> None:
    ops = [dataclasses.replace(op, source="model/m.py:7 in forward") for op in plan.problem.ops]
    problem = dataclasses.replace(plan.problem, ops=tuple(ops))
    shown = dataclasses.replace(scheduled(plan), problem=problem)
    frames = memory_snapshot(shown)["device_traces"][0][1]["frames"]
    assert (frames[0]["filename"], frames[0]["line"]) == ("model/m.py", 7)


# The Chrome trace.


@pytest.mark.parametrize("kind", ["plan", "step_plan"])
def test_slices_nest_and_the_counter_peaks_with_the_plan(
    kind: str, request: pytest.FixtureRequest
) -> None:
    given_plan = request.getfixturevalue(kind)
    trace = json.loads(export_text(given_plan, "chrome"))
    peaks = {1: given_plan.peak, 2: given_plan.baseline_peak}
    for process, peak in peaks.items():
        events = [event for event in trace["traceEvents"] if event["pid"] == process]
        counters = [event for event in events if event["ph"] == "C"]
        assert max(event["args"]["bytes"] for event in counters) == peak
        times = [event["ts"] for event in counters]
        assert all(a < b for a, b in pairwise(times)), "of two at one moment one is not drawn"
        open_until: list[float] = []
        for event in (event for event in events if event["ph"] == "X"):
            while open_until and event["ts"] >= open_until[-1]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_a_trace_names_phase_layer_and_op(plan: Plan) -> None:
    events = chrome_trace(scheduled(plan))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert names == [
        "forward", "blocks.0", "mm", "blocks.1", "mm", "sum", "backward", "expand",
        "blocks.0", "mm (again)", "blocks.1", "mm", "blocks.0", "mm",
    ]  # fmt: skip
    again = next(event for event in events if event["name"] == "mm (again)")
    assert again["args"]["again"]
    assert again["args"]["bytes_in_use"] == 1304
    assert again["dur"] == 1e6


def test_a_plan_without_times_is_drawn(plan: Plan) -> None:
    ops = tuple(dataclasses.replace(op, seconds=0.0) for op in plan.problem.ops)
    still = dataclasses.replace(scheduled(plan), problem=dataclasses.replace(plan.problem, ops=ops))
    trace = chrome_trace(still)
    assert "every op is drawn as one microsecond" in trace["otherData"]["times"]
    assert {e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and "step" in e["args"]} == {1}


def test_generated_code_is_told_from_its_estimate(plan: Plan) -> None:
    compiled = dataclasses.replace(plan, executor="inductor", replayed_peak=1444)
    said = chrome_trace(scheduled(compiled))["otherData"]
    assert (said["peak_bytes"], said["peak_bytes_of_generated_code"]) == (1408, 1444)


# The graph.


def test_a_graph_has_every_op_and_its_fate(plan: Plan) -> None:
    text = graphviz_text(scheduled(plan))
    assert text.startswith("digraph plan {")
    assert text.count("fillcolor") == len(plan.problem.ops)
    assert 'op0 [label="mm\\nm.py:10\\n1.00 s\\nruns 2 times", fillcolor="#f6c08b"]' in text
    assert 'op0 -> op1 [label="a\\n100 B"]' in text
    assert text.count("{") == text.count("}")


def test_a_large_graph_is_drawn_by_layer(plan: Plan) -> None:
    text = graphviz_text(scheduled(plan), "layers")
    assert '[label="blocks.0\\nforward\\ndoes not keep 100 B\\n1 ops run again"' in text
    assert text.count("fillcolor") == 6
    with pytest.raises(InvalidOption, match='detail=\'files\'; it must be "ops" or "layers"'):
        graphviz_text(scheduled(plan), "files")  # type: ignore[arg-type]


def test_calls_of_a_step_are_told_apart_in_its_graph(step_plan: StepPlan) -> None:
    text = graphviz_text(scheduled(step_plan), "layers")
    assert '"call.0.blocks.0\\nforward' in text
    assert '"call.1.blocks.0\\nforward' in text


def test_what_is_offloaded_is_blue_in_a_graph_by_layer(plan: Plan) -> None:
    events = [Step("compute", op) for op in plan.baseline.computes]
    events[2:2] = [Step("offload", 1), Step("wait", 1)]
    events[6:6] = [Step("reload", 1), Step("wait", 1)]
    away = dataclasses.replace(
        scheduled(plan), schedule=with_frees(plan.problem, events), link=Link(50.0, 50.0)
    )
    text = graphviz_text(away, "layers")
    assert '[label="blocks.0\\nforward\\noffloads 100 B", fillcolor="#9cc4ec"]' in text
    assert '[label="blocks.1\\nforward\\nkeeps 200 B", fillcolor="#a8d5a2"]' in text


def test_names_are_quoted(plan: Plan) -> None:
    op = dataclasses.replace(plan.problem.ops[0], target='a"b\\c')
    problem = dataclasses.replace(plan.problem, ops=(op, *plan.problem.ops[1:]))
    assert '"a\\"b\\\\c' in graphviz_text(dataclasses.replace(scheduled(plan), problem=problem))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_real_plan_exports() -> None:
    """With values that share storages, ops with workspaces, layers, source lines."""
    import torch
    from torch import nn

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))
    for executor in ("eager", "inductor"):
        plan = remat.plan(
            model, (torch.randn(32, 16),), loss=lambda y: y.square().mean(),
            memory_budget=0.0, executor=executor, time_limit=0.2,
        )  # fmt: skip
        snapshot = memory_snapshot(scheduled(plan))
        assert peak_of_trace(snapshot) == plan.predicted
        assert json.loads(export_text(plan, "chrome"))["otherData"]["peak_bytes"] == plan.predicted


# The command line.


@pytest.mark.parametrize("to", ["chrome", "json", "graphviz"])
def test_what_is_text_is_printed_or_written(
    to: str, plan: Plan, tmp_path: Path, capsys: Captured
) -> None:
    plan.save(tmp_path / "plan.json")
    line = ["export", str(tmp_path / "plan.json"), "--to", to]
    assert main(line) == DONE
    printed = capsys.readouterr().out
    assert printed == export_text(plan, to)
    assert main([*line, "-o", str(tmp_path / "out")]) == DONE
    assert (tmp_path / "out").read_text(encoding="utf-8") == printed
    assert main([*line, "-o", str(tmp_path / "out")]) == FAILED
    assert "add --force to overwrite it" in capsys.readouterr().err


def test_a_step_is_exported_too(step_plan: StepPlan, tmp_path: Path, capsys: Captured) -> None:
    step_plan.save(tmp_path / "step.json")
    line = ["export", str(tmp_path / "step.json"), "--to", "snapshot"]
    assert main([*line, "-o", str(tmp_path / "step.pickle")]) == DONE
    assert peak_of_trace(pickle.loads((tmp_path / "step.pickle").read_bytes())) == step_plan.peak
    assert main(line) == FAILED
    assert "name the file it goes to, like -o plan.pickle" in capsys.readouterr().err


def test_the_schema_needs_no_plan(capsys: Captured) -> None:
    assert main(["export", "--to", "schema"]) == DONE
    assert capsys.readouterr().out == schema_text()
    assert main(["export", "--to", "chrome"]) == FAILED
    assert "--to chrome needs the plan" in capsys.readouterr().err
    assert main(["export", "plan.json"]) == USAGE


def test_a_plan_that_is_not_there_is_1(capsys: Captured) -> None:
    assert main(["export", "no/plan.json", "--to", "json"]) == FAILED
    assert "cannot read no/plan.json: No such file" in capsys.readouterr().err


def test_an_unknown_format_is_refused(plan: Plan, tmp_path: Path) -> None:
    assert set(FORMATS) == {"snapshot", "chrome", "json", "graphviz"}
    with pytest.raises(InvalidOption, match="to='pdf'; a plan can be exported to snapshot, chrome"):
        remat.export(plan, tmp_path / "plan.pdf", to="pdf")  # type: ignore[arg-type]
