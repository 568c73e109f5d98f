"""The page of a plan: what it holds, what it may do, and what a browser shows of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.cli import DONE, FAILED, main
from remat.plans import Plan
from remat.report.changes import change
from remat.report.html import page_html, subject_of, write_page
from remat.report.html_curve import PlanCurve, PlanPoint, curve_of
from remat.report.html_data import GROUPS, KINDS, OTHER, Subject, groups
from remat.sharing import StepPlan
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Solution, Timeline, decisions
from remat.solvers.simulate import simulate
from remat.step_page import subject_of_step
from tests.remat.browser import Browser, Tab, find_browser, running
from tests.remat.random_plans import LINK, nested_plan, offloading_schedule

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


def _with_hostile_names(plan: Plan) -> Plan:
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
    hostile = _with_hostile_names(plan)
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
    assert data["groups"] == ["between the graphs", "call.0", "call.1"]
    assert "call.1.blocks.0" in data["names"]


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
    assert main([*command, "--force", "--points", "2", "--time-limit", "0.5"]) == DONE
    assert 'class="curve"' in page.read_text(encoding="utf-8")


def test_points_are_for_the_page(plan: Plan, tmp_path: Path, capsys: Any) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--points", "3"]) == FAILED
    assert "add --html PAGE.html" in capsys.readouterr().err


# What follows needs a browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    with running(path, tmp_path_factory.mktemp("profile")) as started:
        yield started


def _open(browser: Browser, plan: Plan | StepPlan | Subject, folder: Path, **kind: Any) -> Tab:
    if isinstance(plan, Subject):
        write_page(folder / "plan.html", plan)
    else:
        plan.to_html(folder / "plan.html")
    tab = Tab(browser, folder / "plan.html", **{"width": 1200, **kind})
    tab.wait_for("document.documentElement.dataset.ready !== undefined")
    assert tab.complaints() == []
    return tab


@pytest.mark.browser
def test_names_from_a_model_are_shown_as_text(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, _with_hostile_names(plan), tmp_path)
    assert tab.evaluate("document.title") == f"remat plan: {HOSTILE}"
    assert tab.evaluate("document.querySelectorAll('script').length") == 2
    assert HOSTILE in tab.evaluate("document.querySelector('#decisions tbody').textContent")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("seed", "link"), [(0, None), (1, None), (2, LINK), (3, LINK), (4, Link(math.inf, math.inf))]
)
def test_the_page_and_the_judge_agree_on_every_change(
    browser: Browser, tmp_path: Path, seed: int, link: Link | None
) -> None:
    plan = nested_plan(seed)
    schedule = plan.solution.schedule if link is None else offloading_schedule(plan)
    timeline = simulate(plan.problem, schedule, link)
    solution = dataclasses.replace(plan.solution, schedule=schedule, timeline=timeline)
    subject = dataclasses.replace(subject_of(plan), solution=solution, link=link)
    tab = _open(browser, subject, tmp_path)
    assert tab.evaluate("document.getElementById('alarm').hidden")
    _check_timeline(tab, "before", plan.baseline, plan.baseline_timeline)
    _check_timeline(tab, "after", schedule, timeline)
    rows = tab.evaluate(
        "page.data.decisions.map(([v, a]) => change(page.problem, page.after, v, a))"
    )
    expected = decisions(plan.problem, schedule)
    assert len(rows) == len(expected) > 3
    for row, (value, decision) in zip(rows, expected.items(), strict=True):
        other = change(plan.problem, schedule, value, decision, link)
        assert ("refused" in row) == (other.timeline is None)
        if other.timeline is not None:
            assert row["peak"] == other.timeline.peak
            assert row["seconds"] == pytest.approx(other.timeline.seconds - timeline.seconds)


def _check_timeline(tab: Tab, name: str, schedule: Schedule, timeline: Timeline) -> None:
    assert tab.evaluate(f"page.{name}.peak") == timeline.peak
    assert tab.evaluate(f"page.{name}.seconds") == pytest.approx(timeline.seconds)
    shown = f"[...page.{name}.bytes].filter((_, at) => page.{name}.steps[at] % 5 !== 1)"
    assert tab.evaluate(shown) == [
        used
        for step, used in zip(schedule.steps, timeline.bytes, strict=True)
        if step.kind != "free"
    ]


@pytest.mark.browser
def test_a_whole_step_is_drawn(browser: Browser, step_plan: StepPlan, tmp_path: Path) -> None:
    tab = _open(browser, step_plan, tmp_path)
    assert tab.evaluate("document.getElementById('alarm').hidden")
    assert tab.evaluate("page.after.peak") == step_plan.peak
    assert tab.evaluate("page.before.peak") == step_plan.baseline_peak
    drawn = tab.evaluate("page.charts[1].marks().map(([, label]) => label)")
    assert drawn[0] == "forward 0"
    assert len(drawn) == 5


@pytest.mark.browser
def test_a_chart_is_used_by_keyboard(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, plan, tmp_path)
    tab.evaluate("document.getElementById('after').focus()")
    said = "document.getElementById('after').getAttribute('aria-valuetext')"
    tab.press("Home")
    assert tab.evaluate(said) == "1.07 KiB at mm, blocks.0, forward"
    tab.press("ArrowRight")
    assert tab.evaluate(said) == "1.27 KiB at mm, blocks.1, forward"
    tab.press("p")
    assert tab.evaluate(said) == "1.38 KiB at expand, (no module), backward"
    tab.press("ArrowRight")
    assert tab.evaluate(said) == "1.27 KiB at mm, blocks.0, recomputed in backward"
    assert "Before: 1.37 KiB" in tab.evaluate(
        "document.getElementById('before-readout').textContent"
    ), "where an op runs again, the other chart waits at the backward op that follows"
    tab.press("End")
    assert tab.evaluate(said).endswith("blocks.0, backward")


@pytest.mark.browser
def test_pointing_at_a_chart_shows_what_is_alive(
    browser: Browser, plan: Plan, tmp_path: Path
) -> None:
    tab = _open(browser, plan, tmp_path)
    box = tab.evaluate("(({x, y, width}) => [x, y, width])(before.getBoundingClientRect())")
    start = box[0] + 72
    tab.mouse(start + 5, box[1] + 60)
    assert tab.evaluate("document.querySelector('#before-readout code').textContent") == "mm"
    alive = tab.evaluate("document.querySelector('#before-readout ul').innerText")
    assert "1000 B" in alive
    assert "100 B" in alive
    assert "blocks.0, waits for backward" in alive
    tab.mouse(start + 5, box[1] + 60, click=True)
    tab.mouse(box[0] + box[2] / 2, box[1] + 60)
    held = tab.evaluate("document.querySelector('#before-readout ul').innerText")
    assert held == alive, "a click holds the cursor"


@pytest.mark.browser
def test_decisions_are_searched_sorted_and_explained(
    browser: Browser, plan: Plan, tmp_path: Path
) -> None:
    tab = _open(browser, plan, tmp_path)
    names = "[...document.querySelectorAll('#decisions tbody button')].map((b) => b.textContent)"
    tab.wait_for("!document.querySelector('#decisions tbody').textContent.includes('…')")
    assert tab.evaluate(names) == ["b", "a"]
    tab.evaluate("document.querySelector('[data-by=name]').focus()")
    tab.press("Enter")
    assert tab.evaluate(names) == ["a", "b"]
    assert tab.evaluate("document.querySelector('th').getAttribute('aria-sort')") == "ascending"
    cells = tab.evaluate("[...document.querySelectorAll('tbody td')].map((c) => c.textContent)")
    assert cells[:8] == [
        "a", "blocks.0", "m.py:10", "100 B", "recompute", "+1.00 s", "+100 B (over)", "−1.00 s"
    ]  # fmt: skip
    tab.evaluate("document.querySelector('[data-by=time]').click()")
    tab.wait_for(f'JSON.stringify({names}) === \'["b","a"]\'')
    tab.evaluate("document.getElementById('search').focus()")
    for key in "blocks.0":
        tab.press(key)
    assert tab.evaluate(names) == ["a"]
    tab.evaluate("document.querySelector('#decisions tbody button').click()")
    chosen = tab.evaluate("document.getElementById('selected').textContent")
    assert chosen.endswith("1 time before, 2 after.")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_all(browser: Browser, tmp_path: Path, dark: bool) -> None:
    tab = _open(browser, nested_plan(0), tmp_path, width=375, height=800, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    assert tab.evaluate("innerWidth") == 375
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 22, 27)" if dark else "rgb(255, 255, 255)")


@pytest.mark.browser
def test_everything_is_reached_with_tab(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, plan, tmp_path)
    for _ in range(15):  # the link to the charts, links, two controls, five colours, two charts
        tab.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "after"
    reachable = tab.evaluate(
        "[...document.querySelectorAll('a[href], button, input, select, canvas, pre')]"
        ".filter((e) => e.tabIndex === 0).map((e) => e.id || e.textContent.trim())"
    )
    assert {"before", "after", "search", "action", "bytes", "a", "modules"} <= set(reachable)
    unnamed = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, canvas')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.browser
def test_a_disagreement_is_said(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    """The page has its own copy of the judge; should they ever differ, nobody is misled."""
    text = page_html(subject_of(plan)).replace('"baseline":1508', '"baseline":1509')
    (tmp_path / "wrong.html").write_text(text, encoding="utf-8")
    tab = Tab(browser, tmp_path / "wrong.html", width=1200)
    said = tab.evaluate("document.getElementById('alarm').innerText")
    assert "disagrees with the plan (before: 1.47 KiB here, 1.47 KiB in the plan)" in said


def test_nested_plans_have_every_decision() -> None:
    """What the tests above are run on is worth it."""
    kinds = {d for seed in range(3) for d in _kinds(nested_plan(seed).problem, nested_plan(seed))}
    assert kinds == {"keep", "recompute"}


def _kinds(problem: Problem, plan: Plan) -> set[str]:
    return {decision.value for decision in decisions(problem, plan.solution.schedule).values()}
