"""What a plan says on a screen, and what a budget that is too small says."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from remat.cli import _terminal
from remat.plans import LayerRow, Plan
from remat.report import text
from remat.report.names import block, file_and_line
from remat.report.text import budget_too_small, plan_text
from remat.solvers.choose import solve
from remat.solvers.offload import least_peak_with_offload
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Solution
from remat.solvers.simulate import simulate
from remat.step_plan import StepPlan


def test_the_head(plan: Plan) -> None:
    lines = plan_text(plan).splitlines()
    assert lines[0] == "plan       two blocks, eager on cpu"
    assert lines[1] == "budget     1.42 KiB"
    assert lines[2] == "peak       1.38 KiB (without remat 1.47 KiB, least 1.38 KiB)"
    assert lines[3] == "resident   1000 B of that: parameters, inputs, state"
    assert lines[4:6] == ["peak is at expand, backward", "           m.py:12"]
    assert lines[6] == "it was at  the same op"
    assert lines[7] == "extra      +10.0 % time, +10.9 % FLOPs"
    assert lines[8] == (
        "gap        a better plan could be faster by 5.00 % at most (ilp, 250.0 ms)"
    )


def test_where_the_peak_was_without_remat(plan: Plan) -> None:
    """With a large workspace in forward, the peak of the plan is there; the baseline's is not."""
    ops = list(plan.problem.ops)
    ops[1] = dataclasses.replace(ops[1], workspace=150)
    problem = dataclasses.replace(plan.problem, ops=tuple(ops))
    solution = dataclasses.replace(
        plan.solution, timeline=simulate(problem, plan.solution.schedule)
    )
    lines = plan_text(dataclasses.replace(plan, problem=problem, solution=solution)).splitlines()
    assert lines[4:6] == ["peak is at mm, forward", "           blocks.1, m.py:11"]
    assert lines[6:8] == ["it was at  expand, backward", "           m.py:12"]


def test_a_replayed_peak_and_the_predicted_one_are_both_shown(plan: Plan) -> None:
    replayed = dataclasses.replace(plan, executor="inductor", replayed_peak=1430)
    lines = plan_text(replayed).splitlines()
    assert lines[2].startswith("peak       1.40 KiB (without remat 1.47 KiB")
    assert lines[3] == "predicted  1.38 KiB by the schedule; the peak is replayed from what runs"


def test_offloading_is_said(plan: Plan) -> None:
    away = dataclasses.replace(plan, link=Link(2.0**30, 2.0**30), offload="host")
    assert plan_text(away).splitlines()[4] == "offload    0 B to host, at 1.00 GiB a second"


def _cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_phases_and_layers(plan: Plan) -> None:
    rows = {cells[0]: cells[1:] for cells in map(_cells, plan_text(plan).splitlines())}
    assert rows["backward"] == ["6.50 s → 7.50 s", "61 → 71", "1.47 KiB → 1.38 KiB"]
    assert rows["blocks.0"] == ["░░░░░░░░", "100 B", "0 B", "+1.00 s"]
    assert rows["blocks.1"] == ["███████████████", "200 B", "200 B"]


def test_decisions_name_bytes_layer_and_source_line(plan: Plan) -> None:
    lines = plan_text(plan).splitlines()
    at = lines.index("the 2 largest of 2 decisions")
    assert _cells(lines[at + 1]) == ["keep", "200 B", "b", "blocks.1 m.py:11"]
    assert _cells(lines[at + 2]) == ["recompute", "100 B", "+1.00 s", "a", "blocks.0 m.py:10"]


def test_a_source_is_shown_by_file_and_line() -> None:
    assert file_and_line("all in one/m.py:3 in forward") == "m.py:3"
    assert file_and_line("transformers/gpt2/modeling.py:312 in forward") == "modeling.py:312"
    assert file_and_line("") == ""


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("transformer.h.3.mlp.act", "transformer.h.3"),
        ("encoder.stages.0.layers.2.conv", "encoder.stages.0"),
        ("0.up", "0"),
        ("lm_head", "lm_head"),
        ("h2.norm1", "h2.norm1"),
        ("", ""),
    ],
)
def test_blocks_are_members_of_lists(layer: str, expected: str) -> None:
    assert block(layer) == expected


def test_notes_are_shown_and_many_are_counted(plan: Plan) -> None:
    assert plan_text(plan).endswith("note: workspace of mm was assumed to be none")
    many = dataclasses.replace(plan, notes=tuple(f"op {i}" for i in range(9)))
    assert plan_text(many).splitlines()[-2:] == ["note: op 5", "and 3 more notes (plan.notes)"]


def test_a_long_note_is_wrapped_and_then_cut(plan: Plan) -> None:
    long = dataclasses.replace(plan, notes=("assumed: " + "aten.add.Tensor, " * 40,))
    lines = plan_text(long).splitlines()[-3:]
    assert lines[0].startswith("note: assumed: aten.add.Tensor, aten")
    assert lines[1].startswith("      aten.add.Tensor")
    assert lines[2].endswith(" …")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("optimal", "gap        none: no plan of its kind is faster"),
        ("not found", "gap        not found: no plan within the budget"),
    ],
)
def test_the_status_is_said(plan: Plan, status: str, words: str) -> None:
    solution = dataclasses.replace(plan.solution, status=status)  # type: ignore[arg-type]
    assert words in plan_text(dataclasses.replace(plan, solution=solution))


def test_printing_a_plan_is_its_text(plan: Plan) -> None:
    assert str(plan) == plan_text(plan)


def test_no_change_has_no_minus(plan: Plan) -> None:
    """A float that is a rounding error below another is not less."""
    seconds = plan.baseline_timeline.seconds * (1 - 1e-12)
    timeline = dataclasses.replace(plan.solution.timeline, seconds=seconds)
    solution = dataclasses.replace(plan.solution, timeline=timeline)
    assert "extra      +0.0 % time" in plan_text(dataclasses.replace(plan, solution=solution))


def test_no_budget_is_said(plan: Plan) -> None:
    assert "budget     none" in plan_text(dataclasses.replace(plan, memory_budget=None))


def _with_long_names(plan: Plan) -> Plan:
    ops = tuple(
        dataclasses.replace(
            op, layer="a.very.long.path." * 9 + op.name, source="/deep/" * 20 + "m.py:1"
        )
        for op in plan.problem.ops
    )
    values = tuple(dataclasses.replace(v, name=v.name * 40) for v in plan.problem.values)
    problem = dataclasses.replace(plan.problem, ops=ops, values=values, name="model" * 30)
    return dataclasses.replace(plan, problem=problem, notes=("n" * 200,))


def test_eighty_columns_whatever_the_names(plan: Plan) -> None:
    lines = plan_text(_with_long_names(plan)).splitlines()
    assert max(map(len, lines)) <= text.WIDTH
    assert not any(line != line.rstrip() for line in lines)


def _rows(count: int) -> list[LayerRow]:
    inside = ("attn", "mlp")
    return [
        LayerRow(f"h.{i}.{part}", 100 + i, 50, 50, 0, 0.5) for i in range(count) for part in inside
    ]


def test_what_is_inside_a_block_is_joined() -> None:
    folded = text._fold(_rows(12))
    assert [row.layer for row in folded] == [f"h.{i}" for i in range(12)]
    assert folded[3] == LayerRow("h.3", 206, 100, 100, 0, 1.0)


def test_many_layers_are_folded_and_nothing_is_lost() -> None:
    rows = _rows(60)
    folded = text._fold(rows)
    assert len(folded) == text.LAYER_ROWS
    assert folded[-1].layer == "45 other layers"
    assert [row.layer for row in folded[:-1]] == [f"h.{i}" for i in range(45, 60)]
    for figure in ("baseline_bytes", "kept_bytes", "extra_seconds"):
        assert sum(getattr(r, figure) for r in folded) == sum(getattr(r, figure) for r in rows)


def test_a_layer_that_keeps_more_than_it_saved_unasked_has_a_bar() -> None:
    """What recomputation reads may be nothing that backward reads."""
    lines = text._layers([LayerRow("a", 0, 100, 0, 0, 0.0), LayerRow("b", 50, 0, 50, 0, 1.0)])
    assert lines[1].count("█") == text._BAR_WIDTH
    assert lines[2].count("░") == round(text._BAR_WIDTH / 2)


def test_what_is_offloaded_is_a_part_of_the_bar() -> None:
    lines = text._layers([LayerRow("a", 90, 30, 30, 30, 0.5)])
    assert "█ kept ▒ away ░" in lines[0]
    assert "█████▒▒▒▒▒░░░░░" in lines[1]


def test_a_budget_between_proven_and_found(problem: Problem, solution: Solution) -> None:
    error = budget_too_small(problem, solution, 1406)
    assert (error.memory_budget, error.least_peak, error.peak_lower_bound) == (1406, 1408, 1404)
    message = str(error)
    assert "memory_budget 1.37 KiB (1406 bytes) is too small." in message
    assert "The least peak a plan was found for is 1.38 KiB (1408 bytes)." in message
    assert "Only below 1.37 KiB (1404 bytes) is it proven" in message
    assert "a longer time_limit may find one" in message
    assert "What proves it" not in message


def test_a_budget_below_what_is_proven(problem: Problem, solution: Solution) -> None:
    message = str(budget_too_small(problem, solution, 1200))
    assert "It is proven that no plan peaks below 1.37 KiB (1404 bytes)." in message
    assert "What proves it is mm in blocks.1, backward." in message
    assert "memory_budget=1408 (or 0.0, the least there is); a smaller batch" in message


def test_it_names_what_is_alive_at_the_peak(problem: Problem, solution: Solution) -> None:
    lines = str(budget_too_small(problem, solution, 1200)).splitlines()
    at = lines.index("That peak is at expand (m.py:12), backward, with these alive:")
    assert [line.strip() for line in lines[at + 1 : at + 6]] == [
        "200 B  b of mm in blocks.1 (m.py:11), forward",
        "200 B  grad_b of expand (m.py:12), backward",
        "4 B  loss of sum (m.py:12), forward",
        "4 B  t (from outside)",
        "1000 B  parameters, inputs and other resident bytes",
    ]


def test_what_is_alive_sums_to_the_peak(solution: Solution) -> None:
    """Workspace and the rest of many values included."""
    rows = text._alive(_workspace(solution), solution)
    assert rows[0] == (500, "workspace of expand")
    assert sum(size for size, _ in rows) == solution.peak + 500


def _workspace(solution: Solution) -> Problem:
    from tests.remat.conftest import PROBLEM

    assert solution.problem_key == PROBLEM.key
    ops: list[Op] = list(PROBLEM.ops)
    ops[3] = dataclasses.replace(ops[3], workspace=500)
    return dataclasses.replace(PROBLEM, ops=tuple(ops))


def test_offloading_is_proposed_where_it_could_do_it(problem: Problem, solution: Solution) -> None:
    roomy = Problem(
        (*problem.values, Value("idle", 4000)),
        (
            *problem.ops[:1],
            Op("make", "forward", (), (len(problem.values),), rerunnable=False),
            *problem.ops[1:],
            Op("read", "backward", (len(problem.values),), ()),
        ),
        problem.fixed_bytes,
    )
    peak = least_peak_with_offload(roomy)
    found = solve(roomy, memory_budget=peak)
    assert found.peak > peak
    assert "offload= (a directory)" in str(budget_too_small(roomy, found, peak))
    assert "offload=" not in str(budget_too_small(roomy, found, peak - 1))


def test_a_budget_below_the_resident_bytes(problem: Problem, solution: Solution) -> None:
    message = str(budget_too_small(problem, solution, 900))
    assert "Resident bytes alone take 1000 B, which no plan can change" in message


def test_piped_text_has_no_colour(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "remat.cli", "show", str(tmp_path / "plan.json")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout == plan_text(plan) + "\n"


def test_a_whole_step_on_one_screen(step_plan: StepPlan) -> None:
    text = str(step_plan)
    assert max(map(len, text.splitlines())) <= 80
    head, phases, layers, decisions, _ = text.split("\n\n")
    assert head.splitlines()[0] == "step       2 graph calls, eager on cpu"
    for line in ("peak is at ", "it was at  ", "extra      +", "gap        "):
        assert f"\n{line}" in head
    assert "FLOPs in the graphs" in head
    assert [line.split()[0] for line in phases.splitlines()[1:]] == [
        "forward", "forward", "eager", "backward", "backward",
    ]  # fmt: skip
    assert "call.0.blocks.0" in layers
    assert decisions.startswith("the 4 largest of 4 decisions")


def test_an_eager_plan_of_a_step_replays_nothing(plan: Plan) -> None:
    """Its peak in the step is smaller than alone, where it holds what it returns to the end."""
    part = dataclasses.replace(plan, executor="eager", replayed_peak=plan.predicted - 1)
    assert "replayed" not in str(part)
    assert f"\nalone      {plan.predicted / 1024:.2f} KiB: alone it holds" in str(part)


def test_a_name_cannot_fake_a_line(plan: Plan) -> None:
    name = "head\ngap        none: \x1b[31mno plan is faster"
    ops = tuple(dataclasses.replace(op, layer=name) for op in plan.problem.ops)
    named = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, ops=ops))
    assert len(str(named).splitlines()) <= len(str(plan).splitlines())
    assert "\x1b" not in str(named)


def test_a_terminal_without_arrows_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(given, encoding="ascii"))
    monkeypatch.setattr(_terminal, "is_terminal", lambda stream: True)
    _terminal.print_report("1 → 2")
    sys.stdout.flush()
    assert given.getvalue().decode() == "1 ? 2\n"
