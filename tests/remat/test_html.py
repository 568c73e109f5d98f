"""The page of a plan: what it holds, what it may do, and what a browser shows of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.cli import DONE, FAILED, main
from remat.joined import Phase, join
from remat.plans import Plan
from remat.report.html import page_html, subject_of
from remat.report.html_curve import PlanCurve, PlanPoint, curve_of
from remat.report.html_data import GROUPS, KINDS, OTHER, groups
from remat.report.names import block
from remat.solvers.problem import Problem
from remat.solvers.schedule import Solution
from remat.solvers.simulate import simulate
from remat.step_page import subject_of_step
from remat.step_plan import StepPlan

HOSTILE = "</script><script>document.title='taken'</script><!--<b>\u2028&amp;"


class _Page(HTMLParser):
    """Every element with its attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": [], "pre": [], "title": []}
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.inside:
            self._open = tag
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.inside[self._open][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """What the scripts are given."""
        data: dict[str, Any] = json.loads(self.inside["script"][0])
        return data


def with_hostile_names(plan: Plan) -> Plan:
    ops = tuple(
        dataclasses.replace(op, layer=f"{op.layer}.{HOSTILE}", source=f"{HOSTILE}:1")
        for op in plan.problem.ops
    )
    values = tuple(dataclasses.replace(v, name=v.name + HOSTILE) for v in plan.problem.values)
    problem = dataclasses.replace(plan.problem, ops=ops, values=values, name=HOSTILE)
    return dataclasses.replace(plan, problem=problem, notes=(HOSTILE,), device=HOSTILE)


def test_the_page_loads_nothing_and_runs_its_own_script_alone(plan: Plan) -> None:
    page = _Page(page_html(subject_of(plan)))
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert not any({"src", "href"} & set(attrs) - {"href"} for _, attrs in page.elements)
    links = [attrs["href"] for tag, attrs in page.elements if "href" in attrs]
    assert all(str(link).startswith("#") for link in links)
    policy = next(attrs["content"] for tag, attrs in page.elements if "http-equiv" in attrs)
    assert str(policy).startswith("default-src 'none'; ")
    for part in (page.inside["script"][1], page.inside["style"][0]):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in str(policy)
    assert not re.search(r"\bstyle=|\bon\w+=\"", page_html(subject_of(plan)).split("<script>")[0])


def test_names_from_a_model_stay_text(plan: Plan) -> None:
    hostile = with_hostile_names(plan)
    page, plain = (_Page(page_html(subject_of(each))) for each in (hostile, plan))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.inside["title"] == [f"remat plan: {HOSTILE}"]
    assert f"blocks.0.{HOSTILE}" in page.data["names"]
    assert page.data["values"]["name"][1] == f"a{HOSTILE}"
    assert page.inside["script"][1] == plain.inside["script"][1]


def test_the_data_is_the_plan(plan: Plan) -> None:
    data = _Page(page_html(subject_of(plan))).data
    steps = [(KINDS[step % len(KINDS)], step // len(KINDS)) for step in data["after"]]
    assert steps == [(step.kind, step.index) for step in plan.solution.schedule.steps]
    assert (data["peak"], data["baseline"], data["budget"]) == (1408, 1508, 1450)
    assert data["decisions"] == [[1, 1, 1.0], [2, 0, 0]]
    assert [data["names"][at] for at in data["ops"]["layer"]] == [
        op.layer for op in plan.problem.ops
    ]
    assert data["ops"]["reads"] == [list(op.reads) for op in plan.problem.ops]


def _figures(text: str) -> dict[str, tuple[str, str]]:
    found = re.findall(
        r'<dt>(.*?)</dt><dd><div class="big [a-z]*">(.*?)</div>(?:<div class="small">(.*?)</div>)?',
        text,
    )
    return {name: (big, small) for name, big, small in found}


def test_the_figures(plan: Plan) -> None:
    figures = _figures(page_html(subject_of(plan)))
    assert figures["memory budget"] == ("1.42 KiB", "the least peak found is 1.38 KiB")
    assert figures["peak before"] == ("1.47 KiB", "at expand (m.py:12), backward")
    assert figures["peak after"] == ("1.38 KiB", "−6.6 %, at expand (m.py:12), backward")
    assert figures["extra time"][0] == "+10.0 %"
    assert figures["extra time"][1].endswith("a step, predicted; extra FLOPs +10.9 %")
    assert figures["gap"][0] == "≤ 5.00 %"
    assert "takes less than 10.45 s" in figures["gap"][1]
    assert "peak predicted" not in figures


def test_the_text_and_the_notes_are_there_without_scripts(plan: Plan) -> None:
    text = page_html(subject_of(plan))
    assert _Page(text).inside["pre"] == [str(plan)]
    assert "<li>workspace of mm was assumed to be none</li>" in text
    assert "<noscript>" in text


def test_a_replayed_peak_stands_beside_the_predicted_one(plan: Plan) -> None:
    replayed = dataclasses.replace(plan, executor="inductor", replayed_peak=1430)
    text = page_html(subject_of(replayed))
    figures = _figures(text)
    assert figures["peak after"][0] == "1.40 KiB"
    assert figures["peak predicted"][0] == "1.38 KiB"
    assert "peak 1.38 KiB predicted, 1.40 KiB replayed" in text
    assert _Page(text).data["replayed"] == 1430


def test_without_a_frontier_the_page_says_how_to_get_one(plan: Plan) -> None:
    text = page_html(subject_of(plan))
    assert "remat show PLAN.json --html PAGE.html --points 9" in text
    assert 'class="curve"' not in text


def test_a_frontier_is_drawn_and_listed(plan: Plan, tmp_path: Path) -> None:
    ends = (PlanPoint(1408, 1408, 0.1, 0.045), PlanPoint(1508, 1508, 0.0, 0.0))
    curve = PlanCurve(ends)
    plan.to_html(tmp_path / "plan.html", frontier=curve)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count('class="dot"') == 2
    assert "this plan: 1.38 KiB, +10.0% time" in text
    assert text.count("<style>") == 1, "the picture takes the page's style, or the policy breaks it"
    assert '<th scope="row">1.38 KiB</th><td class="number">1.38 KiB</td>' in text
    assert '<td class="number">+10.00 %</td><td class="number">+4.50 %</td>' in text


def test_the_knee_of_a_frontier_is_marked(plan: Plan) -> None:
    bent = [PlanPoint(p, p, extra, 0.0) for p, extra in ((1408, 1.0), (1420, 0.1), (1508, 0.0))]
    text = page_html(subject_of(plan), bent)
    assert "<title>knee: 1.39 KiB, +10.0% time</title>" in text
    assert "From the knee on" in text
    assert "From the knee on" not in page_html(subject_of(plan), bent[:2])


def test_a_frontier_without_a_plan_is_not_one_that_was_not_computed(plan: Plan) -> None:
    text = page_html(subject_of(plan), [])
    assert "No plan was found for any of the budgets" in text
    assert "was not computed" not in text


def test_the_points_of_a_stored_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    unasked = dataclasses.replace(
        plan.solution, schedule=plan.baseline, timeline=plan.baseline_timeline, memory_budget=None
    )
    missed = dataclasses.replace(plan.solution, status="not found")

    def solved(problem: Problem, **options: Any) -> list[Solution]:
        assert problem is plan.problem
        assert options["time_limit"] == 15.0, "seconds for each of the points"
        return [missed, plan.solution, unasked]

    monkeypatch.setattr("remat.report.html_curve.solve_frontier", solved)
    points = curve_of(subject_of(plan), points=3, time_limit=5.0).points
    assert [(point.memory_budget, point.peak) for point in points] == [(1450, 1408), (1508, 1508)]
    assert [point.extra_time for point in points] == pytest.approx([0.1, 0.0])
    assert [point.least_extra_time for point in points] == pytest.approx([0.045, 0.0])


@given(
    layers=st.lists(
        st.lists(st.sampled_from(["h", "mlp", "0", "1", "12", "norm"]), max_size=4).map(".".join),
        unique=True,
        max_size=60,
    ),
    heavy=st.integers(0, 9),
)
def test_few_groups_whatever_the_layers(layers: list[str], heavy: int) -> None:
    labels, of = groups(layers, {layer: 1 + heavy * (k % 2) for k, layer in enumerate(layers)})
    assert len(labels) <= GROUPS
    assert len(set(labels)) == len(labels)
    assert len(of) == len(layers)
    assert set(of) == set(range(len(labels)))


def test_neighbours_are_joined_in_order() -> None:
    layers = ["model.wte", *(f"model.h.{i}.mlp" for i in range(24)), "model.ln", "model.head"]
    bytes_of = dict.fromkeys(layers, 100)
    labels, of = groups(layers, bytes_of)
    assert labels == ["wte", *(f"h.{k}–{k + 2}" for k in range(0, 24, 3)), "ln", "head"]
    assert of == sorted(of)
    assert groups(["m.0.up", "m.1"], {"m.0.up": 1, "m.1": 1})[0] == ["m.0", "m.1"]
    labels, _ = groups(layers, bytes_of | {"model.ln": 1, "model.head": 1})
    assert labels[:3] == ["wte", "h.0–1", "h.2–3"], "what cannot be seen needs no colour"
    assert labels[-1] == OTHER


def test_the_page_of_a_whole_step(step_plan: StepPlan, tmp_path: Path) -> None:
    step_plan.to_html(tmp_path / "step.html")
    page = _Page((tmp_path / "step.html").read_text(encoding="utf-8"))
    assert page.inside["title"] == ["remat plan: a step of 2 graph calls"]
    assert page.inside["pre"] == [str(step_plan)]
    labels = [label for _, label in page.data["marks"]]
    assert labels == ["forward 0", "forward 1", "eager", "backward 1", "backward 0"]
    assert [page.data["ops"]["name"][op] for op, _ in page.data["marks"]] == [
        "0: begin", "1: begin", "2: eager", "3: begin", "4: begin"
    ]  # fmt: skip
    assert page.data["predicted"] == step_plan.peak


def test_layers_of_a_whole_step_are_told_apart_by_call(step_plan: StepPlan) -> None:
    data = _Page(page_html(subject_of_step(step_plan))).data
    assert data["groups"] == [
        "between the graphs", "call.0.blocks.0", "call.0.blocks.1", "call.0",
        "call.1.blocks.0", "call.1.blocks.1", "call.1",
    ]  # fmt: skip
    assert "call.1.blocks.0" in data["names"]


def test_the_layers_of_one_call_have_the_names_of_the_model(
    plan: Plan, step_plan: StepPlan
) -> None:
    problem = dataclasses.replace(plan.problem, fixed_bytes=0)
    joined = join([problem], [Phase("forward", 0, 0), Phase("backward", 0, 8)], 1000)
    schedule = joined.schedule([plan.baseline])
    solution = dataclasses.replace(
        plan.solution, schedule=schedule, timeline=simulate(joined.problem, schedule)
    )
    once = dataclasses.replace(
        step_plan, plans=(plan,), joined=joined, solution=solution, baseline=schedule
    )
    data = _Page(page_html(subject_of_step(once))).data
    assert data["groups"] == ["between the graphs", "blocks.0", "blocks.1", "(no module)"]


def test_a_call_is_no_block_of_its_own() -> None:
    assert block("call.1.h.3.mlp", several_calls=True) == "call.1.h.3"
    assert block("call.1", several_calls=True) == "call.1"
    assert block("call.1.h.3.mlp", several_calls=False) == "call.1"
    assert block("between the graphs", several_calls=True) == "between the graphs"


def test_show_writes_the_page_of_a_whole_step(step_plan: StepPlan, tmp_path: Path) -> None:
    step_plan.save(tmp_path / "step.json")
    page = tmp_path / "step.html"
    assert main(["show", str(tmp_path / "step.json"), "--html", str(page)]) == DONE
    assert page.read_text(encoding="utf-8") == page_html(subject_of_step(step_plan))


def test_show_writes_the_page(plan: Plan, tmp_path: Path, capsys: Any) -> None:
    plan.save(tmp_path / "plan.json")
    page = tmp_path / "plan.html"
    command = ["show", str(tmp_path / "plan.json"), "--html", str(page)]
    assert main(command) == DONE
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert page.read_text(encoding="utf-8") == page_html(subject_of(plan))
    assert main(command) == FAILED
    assert "add --force" in capsys.readouterr().err
    assert main([*command, "--force", "--points", "2", "--time-limit", "0.1"]) == DONE
    assert 'class="curve"' in page.read_text(encoding="utf-8")


def test_points_are_for_the_page(plan: Plan, tmp_path: Path, capsys: Any) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--points", "3"]) == FAILED
    assert "add --html PAGE.html" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "plan.json"), "--force"]) == FAILED
    assert "--force is for the page" in capsys.readouterr().err
